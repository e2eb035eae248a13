"""The runtime of a job: session, launch, data streams. Knows no model and no data."""

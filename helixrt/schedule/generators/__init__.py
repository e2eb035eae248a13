"""Published schedules by name, as functions to the IR: `policies` lists them all, `adaptra` is the published baseline."""

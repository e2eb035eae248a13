"""The helix planner and what it is measured by: `plan` searches, `bounds` proves, `optimum` solves exactly."""

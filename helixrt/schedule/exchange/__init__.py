"""Schedules and timelines in other forms: torch's CSV, JSON, Chrome trace, SVG, text. One file per format."""

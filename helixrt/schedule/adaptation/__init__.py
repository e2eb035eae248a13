"""What happens when links slow down during a run: `replan` decides, `replay` and `stragglers` show what it comes to."""

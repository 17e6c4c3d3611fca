"""Other people's measured runs, read from their tables and held against the planner."""

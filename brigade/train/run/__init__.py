"""A run's directory: whose it is, what was resolved, and how it ended."""

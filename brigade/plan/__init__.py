"""Plan a run: whether it fits, how fast it is, and which strategy to take."""

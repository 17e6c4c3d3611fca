"""What hardware can do, and what a model asks of it."""

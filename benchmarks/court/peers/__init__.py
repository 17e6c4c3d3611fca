"""One adapter for each trainer: it does what that trainer's documentation says, in that trainer's own environment."""

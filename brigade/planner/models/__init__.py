"""A model in numbers."""

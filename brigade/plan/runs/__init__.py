"""Serve a run that trains, and learn from one that has trained."""

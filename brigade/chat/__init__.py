"""Talking to the model of a run in the terminal."""

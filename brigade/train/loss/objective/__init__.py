"""Losses that compare answers: functions of their log-probabilities, a file for each, and nothing of ranks or engines."""

"""Ranks that agree, ranks under a supervisor, and hosts that hold the same files."""

"""Describe a model in numbers: what its config.json states, or its code builds and keeps. No clusters, no plans."""

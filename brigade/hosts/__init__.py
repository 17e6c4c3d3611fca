"""Doing things on many hosts: a channel to each over the user's own ssh, an agent at its end, and one verdict for all."""

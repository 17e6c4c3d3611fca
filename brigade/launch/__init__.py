"""Ranks on many hosts: the supervisor, its agents, and files for schedulers and clouds."""

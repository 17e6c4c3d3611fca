"""Hosts, and the way to them: lines over ssh to an agent on each one, and what the agent sees and does there."""

"""Hosts, and the way to them: lines over ssh to an agent on each one, and what the agent sees and does there."""

from typing import Any

Facts = dict[str, Any]  # what a host says of itself, as JSON can hold it: name -> value

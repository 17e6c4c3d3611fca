"""Other people's measured runs, read from their tables and held against the planner, which learns here what they ran with."""

from pathlib import Path

from brigade.plan.costs.conventions import take

take(Path(__file__).with_name("conventions.yaml"))

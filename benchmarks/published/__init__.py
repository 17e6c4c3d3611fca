"""Other people's measured runs, read from their tables and held against the planner, which learns here what they ran with."""

from . import formulas  # noqa: F401 - registers them

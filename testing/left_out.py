"""Tests that a machine without the means for them leaves out, and says so. CI leaves out none."""

import os
from typing import NoReturn

import pytest

NEEDED = "BRIGADE_NEEDS_ALL_TESTS"  # set where none may be left out: .ci/run


def leave_out(why: str) -> NoReturn:
    """Skip this test, or fail where none may be left out. why: which tests, and what they lack"""
    pytest.fail(why) if os.environ.get(NEEDED) else pytest.skip(why)

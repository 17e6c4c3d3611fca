"""What the tests of security share: a file that strangers are after."""

import pytest


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "mine"
    path.write_text("mine\n")
    return path

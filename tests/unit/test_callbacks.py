"""Callbacks that a caller of train.main() hands in."""

from transformers import EarlyStoppingCallback

from brigade.train.loop import preflight


def test_transformers_own_early_stopping_is_refused(mistake):
    said = mistake(preflight.check_callbacks, (EarlyStoppingCallback(),))
    assert "EarlyStoppingCallback" in said and "early_stopping_patience" in said

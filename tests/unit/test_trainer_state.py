"""trainer_state.json in a checkpoint: the bytes that Transformers would write, and each line of the log made into text once."""

import json

import pytest
from transformers import TrainerState

from brigade.train.upstream.checkpoint_files import StateFile


def line(step: int) -> dict[str, object]:
    epoch = float("nan") if step % 5 == 2 else step / 3
    return {"step": step, "loss": 1 / (step + 1), "epoch": epoch, "by": '"a"\n\t é'}


@pytest.fixture
def written(tmp_path):
    """Writes with one StateFile; returns the text, which has to be that of Transformers."""
    file = StateFile()

    def write(state: TrainerState) -> str:
        file.write(state, tmp_path / "ours.json")
        state.save_to_json(str(tmp_path / "theirs.json"))
        text = (tmp_path / "ours.json").read_bytes()
        assert text == (tmp_path / "theirs.json").read_bytes()
        return text.decode()

    return write


@pytest.mark.parametrize("callbacks", [{}, {"Mine": {"args": {"log_history": []}, "attributes": {"log_history": []}}}])
def test_it_has_the_bytes_of_transformers_and_is_read_by_it(written, tmp_path, callbacks):
    state = TrainerState(best_metric=1.5, stateful_callbacks=callbacks)
    for step in range(4):
        written(state)
        assert len(TrainerState.load_from_json(tmp_path / "ours.json").log_history) == len(state.log_history) == step
        state.log_history.append(line(step))
    state.log_history.append({})
    written(state)


def test_lines_that_were_changed_removed_or_replaced_since_are_written_as_they_are(written):
    state = TrainerState(log_history=[*(line(step) for step in range(6)), {"a": [1]}])
    written(state)
    state.log_history[1]["loss"] = 9.0
    state.log_history[4]["more"] = 1
    assert '"loss": 9.0' in written(state)
    state.log_history[6]["a"].append(2)
    written(state)
    state.log_history = [line(step) for step in range(10, 13)]  # as another replica hands it over
    written(state)
    del state.log_history[1:]
    written(state)


@pytest.mark.parametrize("before, after", [({"a": 1.0}, {"b": 1.0}), ({"a": 1}, {"a": 1.0}), ({"a": True}, {"a": 1})])
def test_a_line_whose_new_values_equal_the_old_ones_is_written_as_it_is(written, before, after):
    state = TrainerState(log_history=[before])
    written(state)
    state.log_history[0] = after
    written(state)


def test_a_line_is_made_into_text_once_however_many_checkpoints_hold_it(tmp_path, monkeypatch):
    state, file, texts, dumps = TrainerState(), StateFile(), [], json.dumps

    def counted(value, **options):
        texts.append(value)
        return dumps(value, **options)

    monkeypatch.setattr(json, "dumps", counted)
    for step in range(50):
        state.log_history.append(line(step))
        file.write(state, tmp_path / "trainer_state.json")
    assert sum("log_history" not in text for text in texts) == 50
    assert all(not text.get("log_history") for text in texts)

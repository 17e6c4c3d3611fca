"""The files that docs/extending.md shows, each run as a user would, and what it promises of runs that follow each other."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import yaml

from brigade import train
from testing.command_line import as_flags
from testing.ranks import REPOSITORY
from testing.run_files import losses

EXAMPLES = REPOSITORY / "docs" / "examples"


def test_a_callback_ends_its_run_and_not_the_next_one(done, flags, tmp_path):
    callback = runpy.run_path(str(EXAMPLES / "stop_at_loss.py"))["StopAtLoss"]
    _, expected = done
    limit = losses(expected)[1] + 1e-6
    stopped = train.main([*flags, "--output_dir", tmp_path / "stopped"], callbacks=[callback(limit)])
    assert losses(stopped.state.log_history) == losses(expected)[:2]
    assert json.loads((tmp_path / "stopped" / "success.json").read_text())["steps"] == 2
    again = train.main([*flags, "--max_steps", 3, "--output_dir", tmp_path / "again"])
    assert losses(again.state.log_history) == losses(expected)[:3]


def test_a_model_class_trains_and_is_saved_by_its_name(flags, tmp_path, monkeypatch):
    program = EXAMPLES / "capped_llama.py"
    folder, output = tmp_path / "model", tmp_path / "run"
    folder.mkdir()
    small = json.loads((EXAMPLES / "capped_llama" / "config.json").read_text()) | {"logit_cap": 0.1}
    (folder / "config.json").write_text(json.dumps(small | {"num_hidden_layers": 1}))
    words = ["--model_name_or_path", str(folder), "--max_steps", "1", "--save_steps", "null", "--eval_steps", "null"]
    monkeypatch.setattr(sys, "argv", [str(program), *flags, *words, "--output_dir", str(output)])
    runpy.run_path(str(program), run_name="__main__")
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    assert losses(history)[0] == pytest.approx(8.3178, abs=0.1)  # ln 4096: no logit is beyond its cap
    assert json.loads((output / "config.json").read_text())["model_type"] == "capped_llama"


def test_the_notebook_trains_twice_and_plots_both(tmp_path, monkeypatch):
    """Its cells, in their order, in one process; of each run two steps, on few samples."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(EXAMPLES)
    notebook = json.loads((EXAMPLES / "tiny.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    few = as_flags(max_train_samples=100, max_eval_samples=10, report_page=False)
    changes = {
        "steps = 20": "steps = 2",
        '"--eval_answers", 0': f'"--eval_answers", 0, *{few}',
        "outputs/": f"{tmp_path}/",
    }
    text, known = "\n".join("".join(cell["source"]) for cell in code), {}
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    exec(compile(text, "tiny.ipynb", "exec"), known)
    assert Path.cwd() == REPOSITORY
    lines = known["axes"].get_lines()
    assert [line.get_label() for line in lines] == ["learning rate 0.0003", "learning rate 0.003"]
    assert all(list(line.get_xdata()) == [1, 2] for line in lines)
    records = [yaml.safe_load((tmp_path / f"notebook-{name}" / "run.yaml").read_text()) for name in ("slow", "fast")]
    assert [record["training"]["learning_rate"] for record in records] == [3e-4, 3e-3]
    assert all(record["run"]["command"].startswith("train.py --recipe") for record in records)

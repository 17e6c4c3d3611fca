"""Programs of one's own in place of train.py: how they are started, and what is said of those that are none."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback

from brigade import train
from brigade.hosts.job import make
from brigade.launch import launchers
from brigade.train.recipe import flags, program
from brigade.train.step import preflight
from brigade.train.upstream.trainer import ResumedTensorBoard, resume_tensorboard
from testing.launches import launch_here
from testing.ranks import REPOSITORY

SAYS = """
import json, sys
from brigade import train
from brigade.train.recipe.program import started_as
if __name__ == "__main__":
    words = tuple(sys.argv[1:])
    print(json.dumps([sys.argv, started_as(words), started_as(("--max_steps", "2")), callable(train.main)]))
    sys.exit(3)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "own.py").write_text(SAYS)
    return tmp_path / "own.py"


def test_the_runner_runs_a_program_from_anywhere_with_its_words_and_exit_code(script, tmp_path):
    """--local_rank=1 is what DeepSpeed's launcher puts before a program."""
    command = [sys.executable, str(program.RUNNER), "--local_rank=1", "own.py", "--max_steps", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    words = ["--local_rank=1", "--max_steps", "1"]
    found = json.loads(done.stdout)
    assert found == [["own.py", *words], [str(script), *words], ["train.py", "--max_steps", "2"], True]


@pytest.mark.parametrize("words", [[], ["nowhere.py"]])
def test_the_runner_refuses_what_is_no_file(words):
    command = [sys.executable, "-m", "brigade.train", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "cure: python -m brigade.train FILE" in done.stderr


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "accelerate"])
def test_launch_starts_a_script_in_place_of_train_py(script, tmp_path, launcher):
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=2\nnode2 slots=2\n")
    job = make("recipes/tiny/full.yaml", ["--max_steps", "7"], str(hosts), script=str(script))
    words = launchers.command(launcher, job, launchers.Place(1, "10.0.0.1", 1234))
    expected = [str(script), "--recipe", "recipes/tiny/full.yaml", "--max_steps", "7"]
    assert words[-6:] == ["brigade/train/__main__.py", *expected] or Path.cwd() != REPOSITORY


def test_launch_refuses_a_script_that_is_not_there_and_one_in_a_job_file(script):
    recipe = ("recipes/tiny/full.yaml", "--hostfile", "hostfiles/2x8")
    lost = launch_here(*recipe, "--script", "nowhere.py")
    written = launch_here(*recipe, "--script", str(script), "--write", "sbatch")
    assert lost.returncode == written.returncode == 2
    assert "there is no file nowhere.py" in lost.stderr and "a written job file starts train.py" in written.stderr


def test_hosts_compare_the_files_that_a_user_wrote(tmp_path, monkeypatch):
    (tmp_path / "loss.py").write_text("one")
    settings = flags.load(["--objective", f"{tmp_path}/loss.py:loss"])
    first = program.own_code(settings)
    (tmp_path / "loss.py").write_text("two")
    assert first.keys() == program.own_code(settings).keys() == {"loss.py"} and first != program.own_code(settings)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "loss.py"), raising=False)
    assert program.own_program() == tmp_path / "loss.py"
    assert program.own_code(flags.load([])) == {"loss.py": program.own_code(settings)["loss.py"]}


def test_files_of_one_name_are_all_compared(tmp_path):
    for folder in ("losses", "scores"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text("one")
    named = "--token_loss", f"{tmp_path}/losses/own.py:f", "--answer_score", f"{tmp_path}/scores/own.py:f"
    settings, seen = flags.load(list(named)), []
    for folder in ("scores", "losses", "scores"):
        (tmp_path / folder / "own.py").write_text(f"another {len(seen)}")
        seen.append(program.own_code(settings)["own.py"])
    assert len({*seen}) == 3


def test_a_program_in_no_file_is_refused(tmp_path, monkeypatch, mistake):
    """`python -` names it <stdin>."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    for asked in (program.own_program, lambda: program.own_code(flags.load([]))):
        message = mistake(asked)
        assert "<stdin>" in message and "in no file" in message and "python FILE" in message


def test_main_takes_words_of_any_kind(capsys):
    with pytest.raises(SystemExit) as ended:
        train.main(["--recipe", REPOSITORY / "recipes/tiny/full.yaml", "--epochs", 1.5])
    assert ended.value.code == 2 and "--epochs" in capsys.readouterr().err


def test_the_page_shows_the_files_of_its_examples_as_they_are():
    page = (REPOSITORY / "docs" / "extending.md").read_text()
    shown = re.findall(r"This\s+is\s+\[\w+\.py\]\((examples/\w+\.py)\):\n\n~~~python\n(.*?)~~~", page, re.DOTALL)
    assert len(shown) == 4 == page.count("~~~python")
    assert [(REPOSITORY / "docs" / name).read_text() for name, _ in shown] == [code for _, code in shown]


def test_the_example_of_a_key_is_in_the_files_that_contributing_names():
    steps = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("## A new recipe key")[2]
    files = ["recipe/objectives.py", "recipe/other_names.yaml", "loss/supervised_loss.py", "strategy/refused.yaml"]
    files = [f"brigade/train/{name}" for name in [*files, "recipe/training_section.py"]]
    files += ["brigade/plan/choice/job_of_run.py", "tests/unit/test_flags.py", "tests/ranks/test_parity_terms.py"]
    for name in [*files, "docs/training.md"]:
        assert Path(name).name in steps and "z_loss_coef" in (REPOSITORY / name).read_text(), name


# ---- callbacks -------------------------------------------------------------------------------------------------------
def test_transformers_own_early_stopping_is_refused(mistake):
    said = mistake(preflight.check_callbacks, (EarlyStoppingCallback(),))
    assert "EarlyStoppingCallback" in said and "early_stopping_patience" in said


@pytest.mark.parametrize("step, first", [(0, 0), (4, 5)])
def test_tensorboard_hides_the_steps_that_are_trained_again(step, first, tmp_path):
    callback, begun = ResumedTensorBoard(), []
    callback._SummaryWriter = lambda **how: begun.append(how) or SimpleNamespace(add_text=lambda *_: None)
    state = TrainerState(global_step=step, is_world_process_zero=True)
    callback.on_train_begin(TrainingArguments(str(tmp_path), report_to=[]), state, TrainerControl())
    assert [how["purge_step"] for how in begun] == [first]


def test_a_tensorboard_callback_that_a_user_hands_in_stays(tmp_path):
    """Transformers puts its own before a user's, and only its own is replaced."""
    users = [TensorBoardCallback(), TensorBoardCallback()]
    arguments = TrainingArguments(str(tmp_path), report_to=["tensorboard"], use_cpu=True)
    every = Trainer(torch.nn.Linear(1, 1), arguments, callbacks=list(users)).callback_handler.callbacks
    resume_tensorboard(every)
    found = [callback for callback in every if isinstance(callback, TensorBoardCallback)]
    assert type(found[0]) is ResumedTensorBoard and found[1:] == users

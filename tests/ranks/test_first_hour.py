"""A newcomer's walk from a clone to a model of his own rows that can be served: the commands of docs/first-hour.md as they stand
there, and then those that the run prints, on SmolLM2-135M. Only the training is shorter."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from testing.patience import PATIENCE
from testing.ranks import REPOSITORY

pytestmark = pytest.mark.slow
PAGE = (REPOSITORY / "docs/first-hour.md").read_text()
STEPS = re.findall(r"^ {4}(\w.*)$", PAGE, re.MULTILINE)
NOT_HERE = {
    "make demo": "installs .venv, and trains for minutes",
    "source": "names python, as PATH does here",
    "outputs/demo": "asks for the demonstration's run",
    "--rehearse": "test_rehearsal.py",
    "train.py --recipe recipes/my-model": "is for a GPU",
    "my-hosts": "tests/cluster/test_walk.py",
    "brigade top": "is for a run that trains",
    "vllm": "tests/serving/test_vllm.py starts a server with such a directory",
}
ROWS = [(f"What is {n} plus one?", f"{n + 1}.") for n in range(1, 25)]
SHORT = "--max_steps 4 --eval_steps 4 --save_steps 4 --warmup_steps 0 --global_batch_size 4"
QUESTION = "What is 3 plus one?"


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """The clone in which all commands ran, in order, and what each printed."""
    folder, said = tmp_path_factory.mktemp("walk"), {}
    place = folder
    there = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def run(line):
        done = subprocess.run(line, shell=True, cwd=place, env=there, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        assert "\r" not in done.stdout + done.stderr, "bars are for terminals"
        said[line] = done.stdout

    for line in STEPS:
        if any(part in line for part in NOT_HERE):
            continue
        if line.startswith("git clone"):
            run(line.replace("ADDRESS", str(REPOSITORY)))
            place = folder / "brigade"
            chats = [
                [{"role": "user", "content": asked}, {"role": "assistant", "content": told}] for asked, told in ROWS
            ]
            (place / "my-chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
            continue
        run(f"{line} {SHORT}" if " train.py" in line else line)
    printed = next(text for line, text in said.items() if " train.py" in line)
    served, merging = re.search(r"^Serve it: vllm serve (\S+), after (.+)$", printed, re.MULTILINE).groups()
    run(merging)
    run(re.search(r"^Talk to it: (.+)$", printed, re.MULTILINE)[1] + f" --question '{QUESTION}'")
    run(re.search(r"^Hand it on: (.+) NEW_DIRECTORY$", printed, re.MULTILINE)[1] + " handed-on")
    return place, said, place / served


def test_each_command_of_the_page_runs_or_is_tried_elsewhere(walked):
    _, said, _ = walked
    left = [line for line in STEPS if any(part in line for part in NOT_HERE)]
    assert len(left) + len(said) - 3 == len(STEPS)
    assert all(any(part in line for line in STEPS) for part in NOT_HERE), "a reason for a command that is gone"
    prepared = next(text for line, text in said.items() if "brigade prepare" in line)
    assert re.search(r"^\d+ training and \d+ held-out samples", prepared) and "[[" in prepared


def test_what_would_be_served_answers_as_chat_does(walked):
    """The directory of the page's export, and the one that the run names; the first words, before rounding tells them apart."""
    place, said, served = walked
    (answer,) = {text.strip() for line, text in said.items() if " chat " in line}
    for folder in (place / "my-export", served):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        asked = [{"role": "user", "content": QUESTION}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        told = model.generate(**prompt, do_sample=False, max_new_tokens=8)[0, prompt["input_ids"].shape[1] :]
        assert answer.startswith(tokenizer.decode(told, skip_special_tokens=True).strip())
    assert (place / "handed-on/adapter_model.safetensors").is_file()

"""What comes before heavy packages are needed, or needs none, imports none: each in a Python of its own."""

import sys

import pytest

from testing.command_line import run_here

TOLD = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
COMMAND = "from brigade.__main__ import main; main({})"
STACK = "torch transformers accelerate deepspeed datasets numpy"


@pytest.mark.parametrize("code, heavy, said", [
    ("import brigade.train.recipe.flags, brigade.train.strategy", "torch", ""),
    ("import brigade.launch.write", f"{STACK} kubeflow_trainer_api sky", ""),
    # Rank 1 showed a bar of each download: Transformers, and with it the Hub's library, had been imported before.
    ("import train", f"{STACK} huggingface_hub", ""),
    (COMMAND.format(["--help"]), "torch transformers deepspeed pydantic", "eval"),
    # In half a second, of which these would take more.
    (COMMAND.format(["plan", "--help"]), "torch transformers numpy matplotlib", "--micro_batch"),
    (COMMAND.format(["plan", "recipes/qwen3-8b", "--gpu", "H100 80GB"]), "torch", ""),
    (COMMAND.format(["lint"]), STACK, ""),
])  # fmt: skip
def test_nothing_heavy_is_imported(code, heavy, said):
    done = run_here([sys.executable, "-c", TOLD + code], 100)
    assert done.returncode == 0 and said in done.stdout, done.stderr
    assert not {*heavy.split()} & {*done.stderr.split()}

"""One exported model for every engine: SmolLM2 with adapters of random weights, merged and written by the command."""

import json

import pytest
import torch

from brigade.__main__ import main
from brigade.export import gguf
from brigade.train.run.directory import RECORD
from brigade.train.run.success import SUCCESS
from testing.ranks import REPOSITORY

RECIPE = REPOSITORY / "recipes/smollm2-135m"


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A directory with the model in Hugging Face format and as two GGUF files."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    from brigade.train.checkpoint.saved_weights import ADAPTER
    from brigade.train.model import adapters
    from brigade.train.model.load import weights
    from brigade.train.model.location import load_config
    from brigade.train.model.sizes import empty_model
    from brigade.train.recipe import flags

    run, folder = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("exported") / "tool-calls"
    (run / RECORD).write_text((RECIPE / "lora.yaml").read_text())
    (run / SUCCESS).write_text("{}")
    settings = flags.of_run(run, False)
    config = load_config(settings)
    model = adapters.wrap(empty_model(settings, config), settings, weights(settings, config))
    torch.manual_seed(3)
    shapes = {name: weight.shape for name, weight in get_peft_model_state_dict(model).items()}
    save_file({name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}, run / ADAPTER)
    assert main(["export", str(run), str(folder), "--merge", "--gguf"]) == 0
    gguf.write(folder, folder / "tool-calls-Q8_0.gguf", "Q8_0", gguf.About("tool-calls"))
    return folder


@pytest.fixture(scope="session")
def chats():
    """Twenty conversations, each up to the answer: a system message and a question."""
    rows = (RECIPE / "tool_calls/heldout.jsonl").read_text().splitlines()[:20]
    return [json.loads(row)["messages"][:-1] for row in rows]


@pytest.fixture(scope="session")
def model(exported):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer(exported):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(exported)

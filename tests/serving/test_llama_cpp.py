"""llama.cpp runs what `export --gguf` writes: the same tokens, the same chats and the same answers as Transformers gives."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from brigade.__main__ import main
from brigade.export import gguf
from brigade.train.run.directory import RECORD, SUCCESS
from testing import gguf_models
from testing.ranks import REPOSITORY

pytestmark = pytest.mark.slow
PYTHON = Path(os.environ.get("LLAMA_CPP_PYTHON") or REPOSITORY / ".venv/llama_cpp/bin/python")
RECIPE = REPOSITORY / "recipes/smollm2-135m"
# Log-probabilities, against fp32. llama.cpp rounds activations as it does weights, to F16 or to blocks of 8 bits.
OF_F16 = (
    0.06  # the greatest difference that two tokens which nearly tie may have; 0.029 was measured, on one kind of CPU
)
ROOT_MEAN_SQUARE = {"F16": 0.01, "Q8_0": 0.25}  # 0.004 and 0.15 were measured
TEXTS = [
    "Hello, it's 2026: 12345 apples at 3.14159!",
    "  two  spaces\n\n\tand\ttabs ",
    "Füße 東京 🙂 naïve",
    "<|im_start|>user\nhi<|im_end|>",
    "def f(x):\n    return x**2  # 100 %",
]


def ask(**question):
    assert PYTHON.is_file(), f"there is no {PYTHON}: `make llama_cpp` makes it"
    line = [PYTHON, Path(__file__).with_name("ask_llama_cpp.py")]
    done = subprocess.run(line, input=json.dumps(question), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def after(model, prompt, answer):
    """Log-probabilities of all tokens at each place of an answer to a prompt, [places, tokens]."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """SmolLM2 with adapters of random weights, merged and written by the command."""
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
    from peft import get_peft_model_state_dict

    model = adapters.wrap(empty_model(settings, config), settings, weights(settings, config))
    torch.manual_seed(3)
    shapes = {name: weight.shape for name, weight in get_peft_model_state_dict(model).items()}
    save_file({name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}, run / ADAPTER)
    assert main(["export", str(run), str(folder), "--gguf"]) == 0
    gguf.write(folder, folder / "tool-calls-Q8_0.gguf", "Q8_0", gguf.About("tool-calls"))
    return folder


@pytest.fixture(scope="module")
def chats():
    rows = (RECIPE / "tool_calls/heldout.jsonl").read_text().splitlines()[:20]
    return [json.loads(row)["messages"][:-1] for row in rows]


@pytest.fixture(scope="module")
def model(exported):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind, most", [("F16", 20), ("Q8_0", 6)])
def test_a_merged_model_answers_as_in_transformers(exported, model, chats, kind, most):
    """F16: token for token, but where fp32 itself nearly ties; Q8_0: as near as its rounding allows."""
    from transformers import AutoTokenizer

    tokenizer, chats = AutoTokenizer.from_pretrained(exported), chats[:most]
    told = ask(model=str(exported / f"tool-calls-{kind}.gguf"), chats=chats, texts=TEXTS, new_tokens=16)
    assert told["tokens"] == [tokenizer(text).input_ids for text in TEXTS]
    differences, same = [], 0
    for chat, prompt, answer in zip(chats, told["prompts"], told["answers"], strict=True):
        assert prompt == tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        theirs = [places[0][0] for places in answer]
        ours = after(model, ids, theirs)
        assert len(theirs) == 16 or theirs[-1] in tokenizer.all_special_ids, "the end is a token that is compared, too"
        differences += [
            float(row[token]) - value for row, place in zip(ours, answer, strict=True) for token, value in place
        ]
        same += ours.argmax(-1).tolist() == theirs
        if kind == "F16":
            behind = ours.max(-1).values - ours[range(len(theirs)), theirs]
            assert behind.max() < OF_F16, (tokenizer.decode(theirs), behind.tolist())
    differences = torch.tensor(differences)
    assert len(differences) > 50 * most, "answers are long enough to tell"
    square = differences.square().mean().sqrt()
    print(
        f"{kind}: {same} of {most} answers are the same; at most {differences.abs().max():.4f}, root mean square {square:.4f}"
    )
    assert square < ROOT_MEAN_SQUARE[kind]


@pytest.mark.parametrize("name", [*gguf_models.PLAIN, *gguf_models.SCALED])
def test_each_family_and_rotary_embedding(name, tmp_path):
    """Tied and untied, grouped heads of any width, biases, norms of queries and keys; beyond the original positions; each
    pre-tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = gguf_models.save(tmp_path / "model", **(gguf_models.PLAIN | gguf_models.SCALED)[name])
    gguf.write(folder, tmp_path / "model.gguf", "F16", gguf.About(name))
    generator = torch.Generator().manual_seed(0)
    lengths = (3, 8, 30, 60, 90, 100)
    prompts = [torch.randint(5, 4000, (length,), generator=generator).tolist() for length in lengths]
    told = ask(model=str(tmp_path / "model.gguf"), chats=[], texts=TEXTS, prompts=prompts, new_tokens=4)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert told["tokens"] == [tokenizer(text).input_ids for text in TEXTS]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    compared = []
    for prompt, answer in zip(prompts, told["answers"], strict=True):
        if len(answer) < 4:  # llama.cpp holds a token back that is a part of a character
            continue
        ours = after(model, prompt, [answer[0][0][0]])[0]
        assert len(answer[0]) == 5 and ours.std() > 1
        assert [float(ours[token]) for token, _ in answer[0]] == pytest.approx([of for _, of in answer[0]], abs=OF_F16)
        compared.append(len(prompt))
    assert len(compared) >= 3 and max(compared) > 60, "positions beyond the 32 that scaled ones began with"

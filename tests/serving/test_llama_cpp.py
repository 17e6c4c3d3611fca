"""llama.cpp runs what `export --gguf` writes: the same tokens, the same chats and the same answers as Transformers gives."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from brigade.export import gguf
from testing import gguf_models
from testing.answers import Comparison, after
from testing.ranks import REPOSITORY

pytestmark = pytest.mark.slow
PYTHON = Path(os.environ.get("LLAMA_CPP_PYTHON") or REPOSITORY / ".venv/llama_cpp/bin/python")
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


@pytest.mark.parametrize("kind, most", [("F16", 20), ("Q8_0", 6)])
def test_a_merged_model_answers_as_in_transformers(exported, model, tokenizer, chats, kind, most):
    """F16: token for token, but where fp32 itself nearly ties; Q8_0: as near as its rounding allows."""
    compared, chats = Comparison(model), chats[:most]
    told = ask(model=str(exported / f"tool-calls-{kind}.gguf"), chats=chats, texts=TEXTS, new_tokens=16)
    assert told["tokens"] == [tokenizer(text).input_ids for text in TEXTS]
    for chat, prompt, answer in zip(chats, told["prompts"], told["answers"], strict=True):
        assert prompt == tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert len(answer) == 16 or answer[-1][0][0] in tokenizer.all_special_ids, (
            "the end is a token that is compared, too"
        )
        compared.add(tokenizer(prompt, add_special_tokens=False).input_ids, answer)
    square = compared.root_mean_square
    print(
        f"{kind}: {compared.same} of {most} answers are the same; at most {compared.most:.4f}, root mean square {square:.4f}"
    )
    assert len(compared.differences) > 50 * most, "answers are long enough to tell"
    assert square < ROOT_MEAN_SQUARE[kind]
    if kind == "F16":
        assert compared.behind < OF_F16


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

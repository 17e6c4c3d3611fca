"""vLLM, on a CPU, serves what `export --merge` writes: the same chats and the same answers as Transformers gives."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from testing import marks
from testing.answers import Comparison
from testing.ranks import REPOSITORY

pytestmark = pytest.mark.slow
VLLM = Path(os.environ.get("BRIGADE_VLLM") or REPOSITORY / ".venv/vllm/bin/vllm")
# Root of the mean square of differences of log-probabilities, against Transformers in fp32. In fp32 only the order of sums
# differs: 1e-5 was measured. "auto" is vLLM's default: bf16 where weights were saved in fp32; 0.07 was measured.
ROOT_MEAN_SQUARE = {"float32": 1e-4, "auto": 0.2}
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def ask(exported, dtype, tmp_path_factory):
    """ask(path, **body) -> what a running server answers; without a body the request is a GET."""
    assert VLLM.is_file(), f"there is no {VLLM}: `make vllm` makes it"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "log"
    # Eager and without torch.compile: TorchInductor would compile for a minute. 1 GiB of keys and values, not a share of all
    # memory. The executor in the engine's process: a process less that imports torch and vLLM.
    line = [VLLM, "serve", exported, "--dtype", dtype, "--enforce-eager", "--max-model-len", "1024"]
    line += ["--distributed-executor-backend", "uni", "--host", "127.0.0.1", "--port", str(port)]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
    settings |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as file:
        server = subprocess.Popen(
            line, stdout=file, stderr=subprocess.STDOUT, env=os.environ | settings, start_new_session=True
        )

    def request(path, **body):
        data, head = json.dumps(body).encode() if body else None, {"Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, head), timeout=300
        ) as response:
            return json.loads(response.read() or "null")

    try:
        deadline = time.monotonic() + 500
        while True:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
            try:
                request("/health")
                break
            except urllib.error.URLError:
                time.sleep(0.5)
        yield request
    finally:
        server.terminate()  # which ends its engine, a process of its own, too
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def number(token):
    return int(token.removeprefix("token_id:"))


@pytest.fixture(scope="module")
def dtype(request):
    return request.param


@pytest.mark.parametrize("dtype", marks.cases(slow=["float32"], matrix=["auto"]), indirect=True)
def test_a_merged_model_answers_chats_as_in_transformers(ask, dtype, exported, model, tokenizer, chats):
    """By the command that a run recommends, all chats at once: the exported template's prompts, then token for token."""
    options = {"temperature": 0, "max_tokens": NEW_TOKENS, "logprobs": True, "top_logprobs": 5}
    options |= {"model": str(exported), "return_token_ids": True, "return_tokens_as_token_ids": True}
    with ThreadPoolExecutor(len(chats)) as threads:
        answers = list(threads.map(lambda chat: ask("/v1/chat/completions", messages=chat, **options), chats))
    compared = Comparison(model)
    for chat, told in zip(chats, answers, strict=True):
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert told["prompt_token_ids"] == prompt
        (choice,) = told["choices"]
        taken = choice["token_ids"]
        assert len(taken) == NEW_TOKENS or taken[-1] in tokenizer.all_special_ids
        assert choice["message"]["content"] == tokenizer.decode(taken, skip_special_tokens=True)
        places = []
        for token, place in zip(taken, choice["logprobs"]["content"], strict=True):
            likeliest = {number(top["token"]): top["logprob"] for top in place["top_logprobs"]}
            assert len(likeliest) == 5
            places.append([(token, place["logprob"]), *likeliest.items()])
        compared.add(prompt, places)
    print(
        f"{dtype}: {compared.same} of {len(chats)} answers are the same; at most {compared.most:.1e}, "
        f"root mean square {compared.root_mean_square:.1e}"
    )
    assert len(compared.differences) > 50 * len(chats), "answers are long enough to tell"
    assert compared.root_mean_square < ROOT_MEAN_SQUARE[dtype]
    if dtype == "float32":
        assert compared.same == len(chats)

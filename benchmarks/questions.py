"""Thirty questions of users, each with the command that answers it: docs/planner-questions.md.

python -m benchmarks.questions            # write the page's answers
python -m benchmarks.questions --check    # 1 where an answer is out of date
"""

import os
import shlex
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from tempfile import NamedTemporaryFile
from unittest.mock import patch

from brigade.__main__ import main as brigade
from brigade.plan.hardware import calibration

from .pages import DOCS, command

PAGE = DOCS / "planner-questions.md"
H100 = "--gpu 'H100 80GB'"
# Question -> the words after `python -m brigade plan`, and the first words of lines that answer it beside the first two.
QUESTIONS = {
    "Does LoRA of an 8B model fit my 24 GB card?": ("recipes/llama-3.1-8b/lora.yaml", "trains"),
    "Will all weights of an 8B model train on one H100?": (f"llama-3.1-8b {H100}", "host note"),
    "QLoRA of a 70B model on two 24 GB cards?": (
        "llama-3.1-70b --method qlora --gpu 4090 --hostfile HOSTS --max_length 1024",
        "",
    ),
    "70B in full on 16 H100?": (f"llama-3.1-70b --hostfile hostfiles/2x8 {H100}", "duration"),
    "The same with 10 GbE between the hosts?": (
        f"llama-3.1-70b --hostfile hostfiles/2x8 {H100} --network '10 GbE'",
        "More On --global axes time note",
    ),
    "Do two hosts help an 8B model over 10 GbE?": (
        f"llama-3.1-8b --hostfile hostfiles/2x8 {H100} --network '10 GbE'",
        "More On axes",
    ),
    "A context of 128k tokens for an 8B model on eight H100?": (
        f"llama-3.1-8b --hostfile hostfiles/1x8 {H100} --max_length 131072 --global_batch_size 16",
        "axes note",
    ),
    "A mixture of experts on eight GPUs?": (f"qwen3-30b-a3b --hostfile hostfiles/1x8 {H100}", "axes note"),
    "The cheapest way to train a 32B model on a billion tokens, of up to 16 H100?": (
        f"qwen3-32b --hostfile hostfiles/2x8 {H100} --goal cheapest",
        "The duration",
    ),
    "What does a billion tokens cost me at 2 dollars an hour?": (
        f"qwen3-8b --hostfile hostfiles/1x8 {H100} --price 2",
        "",
    ),
    "How few GPUs train a 14B model in full?": (
        "qwen3-14b --hostfile hostfiles/1x8 --gpu 'A100 80GB' --goal fewest-gpus",
        "The note",
    ),
    "Can 5 billion tokens be done by Monday, in 60 hours?": (
        f"qwen3-14b --hostfile hostfiles/2x8 {H100} --tokens 5e9 --deadline 60",
        "No The",
    ),
    "Do A100s without fast links between hosts train 32B?": (
        "qwen3-32b --hostfile hostfiles/2x8 --gpu 'A100 80GB' --network '25 Gb/s'",
        "More On axes time note",
    ),
    "LoRA or all weights of an 8B model, on eight L40S?": (
        "llama-3.1-8b --hostfile hostfiles/1x8 --gpu L40S",
        "--method",
    ),
    "How good is the guess for a card of which no run is known?": (
        "qwen3-8b --method lora --gpu MI300X",
        "time note",
    ),
    "Does the 405B model fit 16 hosts of eight H100?": (
        f"llama-3.1-405b --hostfile hostfiles/16x8 {H100}",
        "axes note",
    ),
    "And its adapters on two hosts of H200?": ("recipes/llama-3.1-405b/lora.yaml", "trains"),
    "What do Liger's kernels bring?": ("qwen3-8b --method lora --gpu A100", "liger"),
    "How much memory and disk do my hosts need for 8B with offload on a 4090?": (
        "llama-3.1-8b --gpu 4090 --max_length 2048 --host_memory 256",
        "host disk",
    ),
    "All weights of a 70B model on one 4090 with 4 TB of NVMe?": ("llama-3.1-70b --gpu 4090 --nvme 4000", ""),
    "The largest mixture of experts here on 16 hosts?": (
        f"qwen3-235b-a22b --hostfile hostfiles/16x8 {H100}",
        "axes note",
    ),
    "A context of 128k tokens for a hybrid of 27B on eight H100?": (
        f"qwen3.5-27b --hostfile hostfiles/1x8 {H100} --max_length 131072 --global_batch_size 16",
        "",
    ),
    "With sequence parallelism?": (f"qwen3.5-27b --hostfile hostfiles/1x8 {H100} --strategy sp_zero3", ""),
    "Offload on one card without DeepSpeed?": ("llama-3.1-8b --gpu 4090 --strategy fsdp2_offload", ""),
    "Hosts of eight and of four GPUs?": ("qwen3-8b --hostfile UNEQUAL --gpu H100", "More On"),
    "Hosts with different GPUs?": ("qwen3-8b --hostfile UNEQUAL --gpu 'H100 + A100'", ""),
    "QLoRA of GLM-4.5-Air on eight H100?": (f"glm-4.5-air --hostfile hostfiles/1x8 {H100} --method qlora", ""),
    "QLoRA of Gemma 4's mixture of experts on one 4090?": ("gemma-4-26b-a4b --gpu 4090 --method qlora", ""),
    "Twice as many tokens as the model has positions, of which its maker says nothing?": (
        "phi-4 --gpu H200 --method lora --max_length 32768",
        "",
    ),
    "What if my sequences are longer than the model's positions?": (
        "qwen3-8b --hostfile hostfiles/1x8 --gpu H200 --max_length 65536 --global_batch_size 16",
        "65,536",
    ),
}


HOSTFILES = {"HOSTS": "node1 slots=2\n", "UNEQUAL": "node1 slots=8\nnode2 slots=4\n"}


def answer(words: str, lines: str) -> str:
    """The lines of one answer, as the command prints them into a file. words: with names of HOSTFILES"""
    name = next((name for name in HOSTFILES if name in words), "")
    with NamedTemporaryFile("w") as hosts, redirect_stdout(StringIO()) as out, redirect_stderr(out):
        hosts.write(HOSTFILES.get(name, ""))
        hosts.flush()
        brigade(["plan", *shlex.split(words.replace(name, hosts.name) if name else words)])
    shown = words.replace(name, name.lower()) if name else words
    first, second, *others = out.getvalue().replace(hosts.name, name.lower()).splitlines()
    kept = [first, *([second] if second.startswith(("Start: ", "Write it", "Not written")) else [])]
    if first.startswith("error: "):
        kept = [first, second, *others]
    kept += [line for line in others if line.strip().split(" ")[0] in lines.split()]
    return "\n".join([f"    $ python -m brigade plan {shown}", *(f"    {line}" for line in kept)])


def tables() -> dict[str, str]:
    """The page's answers. The factors of nobody's own cluster count."""
    with patch.dict(os.environ, {calibration.VARIABLE: ""}):
        return {
            f"answer-{number}": f"\n**{number}. {question}**\n\n{answer(*asked)}\n"
            for number, (question, asked) in enumerate(QUESTIONS.items(), 1)
        }


def main(argv: list[str] | None = None) -> int:
    return command(PAGE, tables, str(__doc__), argv)


if __name__ == "__main__":
    raise SystemExit(main())

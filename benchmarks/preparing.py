"""Tokenising 100 MB of chats: `python -m brigade prepare` against a plain datasets.map, two processes each.

python -m benchmarks.preparing [--megabytes 100] [--pairs 5]     # -> benchmarks/results/preparing.json, docs/evidence/speed.md

Both read the same JSONL file, render the same template with generation marks, tokenise, cut at max_length and write what a
run reads; whole commands from an empty cache, alternating, medians and the ratio of each pair.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import pages
from benchmarks.pages import EVIDENCE, REPOSITORY, machine, markdown
from benchmarks.peers_tables import spread
from testing.command_line import as_flags

RESULTS = pages.RESULTS / "preparing.json"
MAX_LENGTH = 1024

PLAIN = """
import sys
from datasets import load_dataset
from transformers import AutoTokenizer
file, tokenizer, template, longest, folder = sys.argv[1:]
tokenizer, template, longest = AutoTokenizer.from_pretrained(tokenizer), open(template).read(), int(longest)

def encode(rows):
    found = tokenizer.apply_chat_template(rows["messages"], chat_template=template, tokenize=True, return_dict=True,
                                          return_assistant_tokens_mask=True, truncation=True, max_length=longest)
    return {"input_ids": found["input_ids"], "assistant_masks": found["assistant_masks"]}

rows = load_dataset("json", data_files=file, split="train", cache_dir=folder)
rows.map(encode, batched=True, num_proc=2, remove_columns=rows.column_names)
"""


def write_corpus(path: Path, megabytes: float) -> None:
    """Chats of one to eight of the built-in pairs of question and answer, the same at every call."""
    import numpy as np

    from brigade.train.data import builtin

    lines = builtin.TRAIN.read_text().splitlines()
    pairs = [json.loads(line)["messages"] for line in lines]
    chance = np.random.default_rng(0)
    size = 0
    with path.open("w") as file:
        while size < megabytes * 1e6:
            turns = chance.integers(0, len(pairs), int(chance.integers(1, 9)))
            line = json.dumps({"messages": [message for turn in turns for message in pairs[turn]]}) + "\n"
            size += file.write(line)


def seconds(command: list[str], cache: Path) -> float:
    environment = os.environ | {
        "BRIGADE_CACHE": str(cache),
        "HF_HOME": str(cache),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_CACHE": str(cache),
    }
    began = time.perf_counter()
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return time.perf_counter() - began


def tables() -> dict[str, str]:
    found = json.loads(RESULTS.read_text())
    ours, theirs = found["seconds"]["brigade"], found["seconds"]["datasets.map"]
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    lines = [
        ["`python -m brigade prepare`", f"{statistics.median(ours):.1f} s", spread(ratios, 2, "x")],
        ["plain `datasets.map`", f"{statistics.median(theirs):.1f} s", ""],
    ]
    head = [f"{found['megabytes']:g} MB of chats, median of {len(ratios)}", "time", "speed of the plain one"]
    return {"preparing": markdown(head, lines) + f"\n\nMeasured on: {found['machine']}, {found['date']}."}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    from brigade.train.data import builtin
    from brigade.train.data.chat_template import TEMPLATES
    from brigade.train.run.versions import of_packages

    tokenizer = str(builtin.TOKENIZER)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        write_corpus(corpus, options.megabytes)
        flags = as_flags(
            dataset_name="",
            train_file=str(corpus),
            max_length=MAX_LENGTH,
            dataset_num_proc=2,
            packing=True,
            tokenizer_name_or_path=tokenizer,
        )
        template = str(TEMPLATES / "chatml.jinja")
        commands = {
            "brigade": [sys.executable, "-m", "brigade", "prepare", "recipes/tiny/full.yaml", *flags],
            "datasets.map": [sys.executable, "-c", PLAIN, str(corpus), tokenizer, template, str(MAX_LENGTH)],
        }
        found: dict[str, list[float]] = {name: [] for name in commands}
        for pair in range(options.pairs):
            for name, command in commands.items():
                with tempfile.TemporaryDirectory(dir=folder) as empty:
                    extra = [f"{empty}/plain"] if name == "datasets.map" else []
                    found[name].append(seconds([*command, *extra], Path(empty)))
            print(
                f"pair {pair + 1}: " + ", ".join(f"{name} {times[-1]:.1f} s" for name, times in found.items()),
                flush=True,
            )
    ratios = [theirs / ours for ours, theirs in zip(*found.values(), strict=True)]
    for name, times in found.items():
        median = statistics.median(times)
        print(f"{name:14}{median:7.1f} s  {options.megabytes / median:5.2f} MB/s")
    print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    where = {"machine": machine(), "versions": of_packages(), "date": time.strftime("%Y-%m-%d")}
    RESULTS.write_text(json.dumps({"megabytes": options.megabytes, "seconds": found} | where, indent=1) + "\n")
    pages.write(EVIDENCE / "speed.md", tables())


if __name__ == "__main__":
    main()

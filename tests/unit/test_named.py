"""What a recipe names and is not there is told before anything heavy is imported."""

import json
import subprocess
import sys

PROBE = """
import importlib.util, json, sys
import train
from brigade.errors import UserError
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "wandb" else find(name, *rest)
heavy = {"torch", "transformers", "datasets", "accelerate", "numpy"}
for line in json.loads(sys.argv[1]):
    sys.stderr = open(sys.argv[2], "w+")
    try:
        train.main(line)
    except SystemExit as left:
        sys.stderr.seek(0)
        print(json.dumps([left.code, sys.stderr.read(), sorted(heavy & set(sys.modules))]))
"""
MISTAKES = [
    (["--report_to", "tensorboard,wandb"], "'wandb' is not installed on this host"),
    (["--train_file", "nowhere.jsonl"], "there is no data file 'nowhere.jsonl'"),
    (["--dataset_name", "null", "--train_file", "{rows}", "--validation_file", "no.csv"], "no data file 'no.csv'"),
    (["--datasets", "[{{train_file: {rows}}}, {{train_file: no.jsonl}}]", "--dataset_name", "null"], "'no.jsonl'"),
    (["--dataset_name", "./no-such-set"], "there is no such directory"),
    (["--chat_template", "nope.jinja"], "'nope.jinja'"),
    (["--max_length", "99999"], "99999 tokens, but the model has positions for 1024"),
    (["--model_name_or_path", "/no/such/model"], "there is no such directory"),
    (["--model_name_or_path", "{tmp}"], "no usable config: there is no {tmp}/config.json"),
    (["--model_name_or_path", "no-such.gguf"], "there is no file 'no-such.gguf'"),
    (["--objective", "distill", "--teacher", "/no/teacher"], "flag --teacher\n  '/no/teacher' has no usable config"),
    (["--objective", "distill", "--teacher", "{tmp}"], "no usable config: there is no {tmp}/config.json"),
    (
        ["--objective", "dpo", "--reference", "/no/reference"],
        "flag --reference\n  '/no/reference' has no usable config",
    ),
]


def test_what_is_not_there_is_told_before_heavy_imports(tmp_path):
    """In one process: each mistake in turn, and after each no package was imported that takes seconds."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    fill = {"rows": rows, "tmp": tmp_path}
    lines = [[word.format(**fill) for word in flags] + ["--output_dir", f"{tmp_path}/out"] for flags, _ in MISTAKES]
    run = [sys.executable, "-c", PROBE, json.dumps(lines), f"{tmp_path}/said"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == len(MISTAKES), done.stderr
    for (flags, words), (code, said, heavy) in zip(MISTAKES, told, strict=True):
        assert code == 2 and not heavy and words.format(**fill) in said and "cure: " in said, (flags, said, heavy)
    assert not (tmp_path / "out").exists()

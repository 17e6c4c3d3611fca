"""Training on images on this machine: samples per second of train.py and of a padded Trainer of Transformers, side by side.

    python -m benchmarks.image_speed              # five rounds of both, alternating
    python -m benchmarks.image_speed --only uneven --rounds 1

A model of Qwen3-VL's kind with random weights, whose text has the shape of benchmarks/peers_data.py's, on pictures and the short
questions about them of recipes/tiny-vision: the same rows, order, batch, precision (fp32), optimizer and learning rate for both.
Those rows are all equally long. Uneven ones have one to four of the questions, and pictures scaled to sides of 32 to 192 pixels.
Each reads its images while it trains. The rates go into results and the page. Nothing is downloaded. The Trainer pads to the
longest row of a batch, and computes all logits, as Transformers does by default; TRL's would need torchvision.
"""

import io
import json
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import peers, peers_count, peers_data, side_by_side
from benchmarks.pages import EVIDENCE, REPOSITORY, RESULTS, Row, command_line, read, write
from benchmarks.peers_tables import OURS
from testing.command_line import as_flags

RECIPE = REPOSITORY / "recipes" / "tiny-vision"
WORK = REPOSITORY / "outputs" / "image_speed"
PAGE, RESULTS_FILE = EVIDENCE / "images.md", RESULTS / "image_speed.jsonl"
EVEN, UNEVEN = "even", "uneven"
NAMES = {EVEN: "rows of one length, samples", UNEVEN: "uneven rows, samples"}
SIDE, SPREAD = 64, 0.5  # pixels of an uneven picture's side: median, and standard deviation of the logarithm
STEPS, BATCH = 10, 8  # measured steps; rows of a step
IMAGE = "<|image_pad|>"
JOB: Row = {"steps": STEPS, "micro_batch": BATCH, "accumulation": 1, "learning_rate": 1e-4, "optim": "adamw_torch_fused",
            "bf16": False, "seed": 1, "arguments": {"train_sampling_strategy": "sequential", "adam_beta2": 0.95}}  # fmt: skip


def write_model() -> None:
    """Write the model with random weights, the same each time, and its tokenizer and processor."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = json.loads((RECIPE / "config.json").read_text())
    rope = config["text_config"]["rope_parameters"] | {"mrope_section": [16, 8, 8]}
    config["text_config"] |= peers_data.MODEL | {"rope_parameters": rope, "initializer_range": 0.02}
    width = {"hidden_size": 256, "intermediate_size": 1024, "depth": 6, "num_heads": 4}
    config["vision_config"] |= width | {"out_hidden_size": peers_data.MODEL["hidden_size"], "initializer_range": 0.02}
    torch.manual_seed(peers_data.SEED)
    shutil.copytree(RECIPE, WORK / "model", dirs_exist_ok=True)
    (WORK / "model" / "config.json").write_text(json.dumps(config))
    processor = json.loads((RECIPE / "preprocessor_config.json").read_text())
    processor["size"]["longest_edge"] = 192 * 192  # pixels: uneven pictures are not scaled again
    (WORK / "model" / "preprocessor_config.json").write_text(json.dumps(processor))
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(WORK / "model"))
    model.save_pretrained(WORK / "model")


def write_rows() -> None:
    """Write the rows of both kinds, the same each time."""
    import pyarrow
    import pyarrow.parquet as parquet
    from PIL import Image

    table = parquet.read_table(RECIPE / "train.parquet")
    parquet.write_table(table, WORK / f"{EVEN}.parquet")
    draw, rows = random.Random(peers_data.SEED), table.to_pylist()
    for row in rows:
        row["messages"] = row["messages"][: 2 * draw.randint(1, len(row["messages"]) // 2)]
        for each in row["images"]:
            sides = [round(min(192.0, max(32.0, SIDE * draw.lognormvariate(0, SPREAD)))) for _ in range(2)]
            file = io.BytesIO()
            Image.open(io.BytesIO(each["bytes"])).resize(sides).save(file, "PNG")
            each["bytes"] = file.getvalue()
    parquet.write_table(pyarrow.Table.from_pylist(rows, table.schema), WORK / f"{UNEVEN}.parquet")


def drawn(kind: str) -> list[Row]:
    """Return the rows of all steps in the order in which train.py draws them."""
    import pyarrow.parquet as parquet

    from brigade.train.data.sampling import GlobalBatches

    rows = parquet.read_table(WORK / f"{kind}.parquet").to_pylist()
    order = GlobalBatches(len(rows), BATCH, 1, 0, 1, JOB["seed"]).order().flatten()
    return [rows[place] for place in order[: (STEPS + 1) * BATCH]]


def ours(kind: str) -> Row:
    """One run of train.py: {"seconds", "losses", "others", ...}, of all steps but the first where seconds."""
    shutil.rmtree(WORK / "ours", ignore_errors=True)
    changed = {key: JOB[key] for key in ("learning_rate", "optim", "bf16", "seed")}
    whole = {"global_batch_size": BATCH, "per_device_train_batch_size": BATCH, "max_steps": STEPS + 1}
    quiet = {
        "logging_steps": 1,
        "max_eval_samples": 2,
        "eval_steps": "null",
        "save_steps": "null",
        "report_page": False,
    }
    places = {"model_name_or_path": WORK / "model", "tokenizer_name_or_path": WORK / "model", "from_scratch": False}
    places["train_file"] = WORK / f"{kind}.parquet"
    more = {"lr_scheduler_type": "constant", "warmup_steps": 0, "weight_decay": 0, "report_to": "[]"}
    flags = changed | whole | quiet | places | more | {"output_dir": WORK / "ours"}
    words = as_flags(recipe=str(RECIPE / "full.yaml"), **{key: str(value) for key, value in flags.items()})
    others = peers._run([sys.executable, "train.py", *words], WORK / "ours.log")
    history = json.loads((WORK / "ours" / "trainer_state.json").read_text())["log_history"]
    return peers.from_log(history, STEPS) | {"others": others}


def padded(kind: str) -> Row:
    """One run of the Trainer, in a process of its own: as of ours()."""
    others = peers._run([sys.executable, "-m", "benchmarks.image_speed", "--padded", kind], WORK / "padded.log")
    return json.loads((WORK / "padded.json").read_text()) | {"others": others}


class Reader:
    """A data collator: rows as padded tensors, labels on the assistant's own tokens."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoTokenizer

        from brigade.train.upstream.image_processors import read_image_processor

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.images = read_image_processor(str(folder), None, AutoConfig.from_pretrained(folder))

    def sample(self, row: Row, slots: list[int]) -> tuple[list[int], list[int]]:
        """Return ids and labels of a row. slots: tokens of its images"""
        text, wanted = self.tokenizer, self.tokenizer.convert_tokens_to_ids(IMAGE)
        chat = [turn | {"content": turn["content"].replace("<image>", f"<|vision_start|>{IMAGE}<|vision_end|>")}
                for turn in row["messages"]]  # fmt: skip
        said = text.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, labels, left = [], [], iter(slots)
        for token, own in zip(said["input_ids"], said["assistant_masks"], strict=True):
            times = next(left) if token == wanted else 1
            ids += [token] * times
            labels += [token if own else peers_count.IGNORED] * times
        return ids, labels

    def __call__(self, rows: list[Row]) -> dict[str, Any]:
        import torch
        from PIL import Image
        from torch.nn.utils.rnn import pad_sequence

        images = [[Image.open(io.BytesIO(each["bytes"])).convert("RGB") for each in row["images"]] for row in rows]
        pixels = dict(self.images(images=[image for of_row in images for image in of_row], return_tensors="pt"))
        slots = iter((pixels["image_grid_thw"].prod(1) // self.images.merge_size**2).tolist())
        samples = [self.sample(row, [next(slots) for _ in of_row]) for row, of_row in zip(rows, images, strict=True)]
        pad = {"input_ids": self.tokenizer.pad_token_id, "labels": peers_count.IGNORED, "attention_mask": 0}
        columns = [*zip(*samples, strict=True), [[1] * len(ids) for ids, _ in samples]]
        batch = {
            key: pad_sequence([torch.tensor(each) for each in column], batch_first=True, padding_value=pad[key])
            for key, column in zip(pad, columns, strict=True)
        }
        kinds = batch["input_ids"] == self.tokenizer.convert_tokens_to_ids(IMAGE)
        return batch | pixels | {"mm_token_type_ids": kinds.int()}


def train_padded(kind: str) -> None:
    """Train by Transformers' Trainer, and write what it counted."""
    import torch
    from transformers import AutoModelForImageTextToText, Trainer, TrainingArguments

    model = AutoModelForImageTextToText.from_pretrained(WORK / "model", dtype=torch.float32, attn_implementation="sdpa")
    arguments = TrainingArguments(
        **peers_count.arguments(JOB | {"output": str(WORK / "padded")}), remove_unused_columns=False
    )
    trainer = peers_count.counted(Trainer)(
        model=model, args=arguments, train_dataset=drawn(kind), data_collator=Reader(WORK / "model")
    )
    trainer.counter = peers_count.Counter()
    trainer.add_callback(trainer.counter)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    (WORK / "padded.json").write_text(json.dumps(trainer.counter.result() | {"losses": losses}))


def apart(rounds: Sequence[tuple[Row, Row]]) -> float:
    """Return by how much the losses of a step of the two differ at most."""
    pairs = [zip(own["losses"], other["losses"], strict=True) for own, other in rounds]
    return max(abs(mine - its) for pair in pairs for mine, its in pair)


def counts(rounds: Sequence[tuple[Row, Row]]) -> Row:
    """Return the tokens of a step, by the Trainer's count: those of rows, with padding, and those with a label."""
    its = rounds[0][1]
    return {key: its[key] / STEPS for key in ("tokens", "positions", "supervised_tokens")}


def tables() -> dict[str, str]:
    """Return the page's table, where results have it, and what a step of each kind of rows has."""
    rows = read(RESULTS_FILE) if RESULTS_FILE.exists() else []
    parts = [side_by_side.table(rows, NAMES, "Trainer")]
    newest = {row["name"]: row for row in rows}
    for row in (newest[kind] for kind in NAMES if kind in newest):
        kept, padded, labels = (f"{row[key]:.0f}" for key in ("tokens", "positions", "supervised_tokens"))
        said = f"A step of {row['name']} rows has {kept} tokens, {padded} with padding, and {labels} have a label."
        parts.append(f"{said} The two losses of a step differ by at most {row['apart']:.1e}.")
    return {"image-speed": "\n\n".join(parts)} if parts[0] else {}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="a figure is their median (default: 5)")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=[*NAMES], help="kinds of rows (default: both)")
    parser.add_argument("--padded", choices=NAMES, help="only the Trainer's run on these rows, which are there")
    options = parser.parse_args()
    if options.padded:
        train_padded(options.padded)
        return
    WORK.mkdir(parents=True, exist_ok=True)
    write_model()
    write_rows()
    for kind in options.only:
        rounds = []
        for _ in range(options.rounds):
            peers.wait_until_quiet()
            own = ours(kind)
            peers.wait_until_quiet()
            rounds.append((own, padded(kind)))
        mine, its = zip(*rounds, strict=True)
        measured = side_by_side.rows_of(kind, {OURS: mine, "padded": its}, STEPS * BATCH)
        side_by_side.keep(RESULTS_FILE, [row | {"apart": apart(rounds)} | counts(rounds) for row in measured])
    print(f"fp32, {STEPS} steps of {BATCH}.\n\n{tables()['image-speed']}")
    write(PAGE, tables())


if __name__ == "__main__":
    main()

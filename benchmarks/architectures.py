"""Every causal language model of the pinned Transformers, tiny and with random weights: what trains it, how exactly, or why not.

    python -m benchmarks.architectures                       # what the results lack for these versions
    python -m benchmarks.architectures --only qwen3,lfm2     # of these types of config alone

Each strategy's losses and gradient norms are compared with those of one process on the same samples, in fp32. Rows are kept in
benchmarks/results/architectures.jsonl, each with its versions: after an upgrade all are measured again, and what changed is
printed, and the page's tables are written. All of them take three quarters of an hour on two idle cores.
"""

import contextlib
import io
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from brigade import __main__ as brigade
from brigade.train.model.tiny import shrink
from testing import parity, runs
from testing.ranks import run_ranks

from . import architectures_tables, pages

RESULTS = pages.RESULTS / "architectures.jsonl"
KEYS = ("loss", "grad_norm", "eval_loss")
AT_ONCE = 20  # types of config whose rows are kept together
STEPS = 4
RATE = "0.01"  # of SGD: at 0.1 rounding grows to 2e-5 in Gemma 4
# A random model that rounding moves further than TOLERANCE is as near as so many times its difference from itself in smaller
# micro-batches, but no further than LARGEST.
ROUNDING, LARGEST = 3, 1e-4


class Column(NamedTuple):
    """A run of each architecture.

    reference: the column whose losses it should have, "" for none; accumulation: micro-batches in a step
    published: whether it is given the config as Transformers has it by default, which a rehearsal makes tiny by itself
    """

    ranks: int
    flags: list[str]
    reference: str
    accumulation: int = 1
    published: bool = False


EXPERTS = {
    "distributed_type": "FSDP",
    "fsdp_config": {"fsdp_version": 2},
    "parallelism_config": {"parallelism_config_ep_size": 2},
}
LORA = ["--use_peft", "true", "--lora_target_modules", "all-linear"]
COLUMNS = {
    "one process": Column(1, [], ""),
    "accumulation": Column(1, [], "one process", accumulation=4),
    "padded": Column(1, ["--padding_free", "false"], "one process"),
    "DDP": Column(2, parity.STRATEGIES["ddp"], "one process"),
    "ZeRO-3": Column(2, parity.STRATEGIES["zero3"], "one process"),
    "FSDP2": Column(2, parity.STRATEGIES["fsdp2"], "one process"),
    "LoRA": Column(1, LORA, ""),
    "LoRA, ZeRO-3": Column(2, [*LORA, *parity.STRATEGIES["zero3"]], "LoRA"),
    "tensor": Column(2, ["--ds_config", "ds_configs/zero1_tp2.json"], "one process"),
    "pipeline": Column(2, ["--ds_config", "ds_configs/zero1_pp2.json"], "one process"),
    "sequence": Column(2, ["--accelerate_config", "accelerate_configs/fsdp2_sp2_1x2.yaml"], "one process"),
    "experts": Column(2, ["--accelerate_config", json.dumps(EXPERTS)], "one process"),
    "rehearsal": Column(
        2, [*parity.STRATEGIES["fsdp2"], "--bf16", "--activation_checkpointing", "--rehearse"], "", published=True
    ),
}
PLAN = ["--gpu", "H100 80GB", "--hostfile", "hostfiles/2x8", "--max_length", "256"]
PUBLISHED = "published"  # the folder of configs that are not tiny
LARGEST_TINY = 20_000_000  # parameters
# Keys without which Transformers' default config of a type builds no model, or one without attention; published ones have them.
LACKING: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        }
    },
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 4},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 10 + ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": (["conv"] * 3 + ["full_attention"]) * 8},
    "nemotron": {"num_key_value_heads": 8},
    **{name: {"head_dim": 128} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
}


def known() -> list[str]:
    """The types of config for which Transformers has a model that predicts the next token."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(name: str, folder: Path) -> str:
    """Write the tiny model of a type of config; returns what went wrong, or nothing."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    try:
        config = CONFIG_MAPPING[name](**LACKING.get(name, {}))
        if config.is_encoder_decoder:
            return "an encoder and a decoder"
        with torch.device("meta"):
            tiny = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name].from_dict(shrink(config.to_dict())))
        if (size := tiny.num_parameters()) > LARGEST_TINY:
            return f"shrink() does not know its sizes: its tiny model has {size:,} parameters"
        # Each rank draws its own dropout.
        dropout = {key: 0.0 for key, value in config.to_dict().items() if "drop" in key and isinstance(value, float)}
        runs.write_model(folder / name, name, config.to_dict() | dropout, divisor=2)  # of the column tensor
        published = folder / PUBLISHED / name
        published.mkdir(parents=True)
        (published / "config.json").write_text(json.dumps(config.to_dict()))
    except Exception as error:  # of any kind: what others wrote is tried out
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    return ""


def train(column: str, names: list[str], folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the result of each model's run. One that dies in the middle ends its process, and the next ones get another."""
    ranks, flags, _, accumulation, published = COLUMNS[column]
    shared = runs.write_inputs(folder, STEPS)
    shared += [
        "--optim",
        "sgd",
        "--learning_rate",
        RATE,
        "--per_device_train_batch_size",
        str(runs.GLOBAL_BATCH // ranks // accumulation),
    ]
    outputs = folder / column
    outputs.mkdir(exist_ok=True)
    cases: list[dict[str, Any]] = []
    for name in names:
        model = [
            "--model_name_or_path",
            str(folder / (PUBLISHED if published else "") / name),
            "--from_scratch",
            "false",
        ]
        cases.append({"name": name, "flags": [*shared, *model, *flags, "--output_dir", str(outputs / name)]})
    tried: set[str] = set()
    while cases:
        first = cases[0]
        job = outputs / "job.json"
        job.write_text(json.dumps({"folder": str(folder), "results": str(outputs), "cases": cases}))
        done = run_ranks("benchmarks.architectures_worker", str(job), ranks=ranks, timeout=60 + 60 * len(cases))
        while cases and (result := outputs / f"{cases[0]['name']}.result.json").exists():
            yield cases.pop(0)["name"], json.loads(result.read_text())
        if cases and (cases[0] is first or cases[0]["name"] in tried):
            yield cases.pop(0)["name"], {"failed": done.stderr}
        elif cases:  # what another model left in the process may have killed it
            tried.add(cases[0]["name"])


def plan(name: str, folder: Path) -> dict[str, Any]:
    """Plan full fine-tuning on two hosts of eight GPUs; a result as train() yields it."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = brigade.main(["plan", str(folder / PUBLISHED / name), *PLAN])
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    text = said.getvalue()
    if code and "error" not in text:
        text = "no strategy fits the GPUs"
    return {"refused": text} if code else {"log": [], "said": ""}


_USERS = re.compile(r"^error[^\n]*\n  ([^\n]+)\n  cure: ", re.M)  # a user's error, and no traceback


def verdict(result: dict[str, Any], reference: dict[str, Any] | None, rounding: float = 0) -> pages.Row:
    """What a row says of a run: {"verdict": "trains", "equal", "differs", "refused" or "fails", "difference", "why"}

    rounding: the model's difference from itself in smaller micro-batches
    """
    if "refused" in result:
        return {"verdict": "refused", "difference": None, "why": _problem(result["refused"])}
    if "failed" in result and (told := _USERS.search(result["failed"])):  # once the model was there
        return {"verdict": "refused", "difference": None, "why": told[1]}
    if "failed" in result:
        return {"verdict": "fails", "difference": None, "why": _last_error(result["failed"])}
    if reference is None:
        return {"verdict": "trains", "difference": None, "why": _row("samples", result["said"])}
    if "log" not in reference:
        return {"verdict": "trains", "difference": None, "why": "there is nothing to compare it with"}
    figures = (
        {key: [entry[key] for entry in one["log"] if key in entry] for key in KEYS} for one in (result, reference)
    )
    difference = max(parity.worst(*figures).values())
    equal = difference <= max(parity.TOLERANCE, min(ROUNDING * rounding, LARGEST))
    return {"verdict": "equal" if equal else "differs", "difference": difference, "why": ""}


def _row(name: str, text: str) -> str:
    """What a run's table has in its row of this name."""
    return next((line.removeprefix(name).strip() for line in text.splitlines() if line.startswith(f"{name} ")), "")


def _problem(text: str) -> str:
    """The second line of an error: place, problem, cure."""
    lines = text.strip().splitlines()
    found = [lines[number + 1].strip() for number, line in enumerate(lines[:-1]) if line.startswith("error")]
    return (found or lines or [""])[0]


def _last_error(text: str) -> str:
    """The last line of a traceback that names an exception."""
    lines = [
        line.strip()
        for line in text.splitlines()
        if ": " in line and line.split(": ")[0].endswith(("Error", "Exception"))
    ]
    return (lines or text.strip().splitlines() or ["its process ended without a word"])[-1][:300]


def measure(names: list[str], folder: Path, rows: dict[tuple[str, str], pages.Row]) -> None:
    """Fill in what is missing of these types of config, and keep the rows after each column."""
    here = pages.where()
    for key in [key for key in rows if key[0] in names]:
        del rows[key]  # what is not measured now is not known of these versions
    models = []
    for name in names:
        why = build(name, folder)
        rows[name, "builds"] = {"verdict": "builds" if not why else "fails", "difference": None, "why": why} | here
        models += [name] * (not why)
    results: dict[str, dict[str, Any]] = {}
    for name in models:
        rows[name, "plan"] = verdict(plan(name, folder), None) | here
    for column, (_, _, reference, *_) in COLUMNS.items():
        wanted = [name for name in models if not reference or "log" in results[reference].get(name, {})]
        results[column] = {}
        for name, result in train(column, wanted, folder):
            results[column][name] = result
            rounding = rows.get((name, "accumulation"), {}).get("difference") or 0
            rows[name, column] = verdict(result, results[reference][name] if reference else None, rounding) | here
            row = rows[name, column]
            row["why"] = row["why"].replace(f"{folder}/", "")  # it is another one the next time
            size = "" if row["difference"] is None else f"by {row['difference']:.0e}"
            print(f"{name}, {column}: {row['verdict']} {size} {row['why']}"[:160], flush=True)
        save(rows)


def save(rows: dict[tuple[str, str], pages.Row]) -> None:
    pages.save(
        RESULTS, [{"architecture": name, "column": column} | row for (name, column), row in sorted(rows.items())]
    )


def read() -> dict[tuple[str, str], pages.Row]:
    """(type of config, column) -> its row"""
    if not RESULTS.exists():
        return {}
    return {(row.pop("architecture"), row.pop("column")): row for row in pages.read(RESULTS)}


def tables() -> dict[str, str]:
    return architectures_tables.tables(read(), [*COLUMNS, "plan"])


def main() -> None:
    """Measure what is missing, and say what changed."""
    parser = pages.command_line(__doc__)
    parser.add_argument(
        "--only", help="types of config, with commas between them; else all that have no row of these versions"
    )
    options = parser.parse_args()
    only = options.only
    rows, versions = read(), pages.where()["versions"]
    last = [*COLUMNS][-1]  # without it, an earlier run was interrupted
    done = {name for name, _ in rows if rows[name, "builds"]["versions"] == versions}
    done = {name for name in done if rows[name, "builds"]["verdict"] != "builds" or (name, last) in rows}
    names = only.split(",") if only else [name for name in known() if name not in done]
    if strange := sorted({*names} - {*known()}):
        parser.error(f"Transformers has no causal language model of type {', '.join(strange)}")
    with tempfile.TemporaryDirectory() as folder:
        for start in range(0, len(names), AT_ONCE):
            before = dict(rows)
            measure(names[start : start + AT_ONCE], Path(folder), rows)
            for key in sorted(rows.keys() & before.keys()):
                if rows[key]["verdict"] != before[key]["verdict"]:
                    print(f"{', '.join(key)}: {before[key]['verdict']} before, {rows[key]['verdict']} now")
    pages.write(architectures_tables.PAGE, tables())


if __name__ == "__main__":
    main()

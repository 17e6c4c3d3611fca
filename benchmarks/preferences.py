"""Preference training on this machine: the losses of train.py, of TRL's trainers and of a plain loop, and how fast the two are.

    python -m benchmarks.preferences                    # DPO, KTO and ORPO: five rounds of both, alternating
    python -m benchmarks.preferences --losses           # one round of each, for the losses
    python -m benchmarks.preferences --only dpo ipo     # of RUNS these
    python -m benchmarks.preferences --without ours     # TRL and the plain loop
    python -m benchmarks.preferences --short            # DPO, KTO, ORPO and SFT on rows of one sentence, which are nearly alike
    python -m benchmarks.preferences --tiny             # every objective on a tiny random model, for the losses

SmolLM2-135M-Instruct, all parameters, on sentences and the tool calls that they ask for: the same rows, order, batch, precision
(fp32), learning rate and optimizer for all. A rejected answer is another row's. A row has one to eight sentences, their number
log-normal, for the lengths of answers that people compare are as uneven; with --short and --tiny it has one. Rates of DPO, KTO,
ORPO and SFT go into results and the page, but not with --losses and --tiny. Nothing is downloaded; TRL lives in .venv/peers
(benchmarks/peers.py). Where TRL computes something else than the papers is told in docs/evidence/preferences.md.
"""

import json
import multiprocessing
import random
import shutil
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import peers, side_by_side
from benchmarks.pages import EVIDENCE, REPOSITORY, RESULTS, Row, command_line, machine, markdown, read, write
from testing.command_line import as_flags

WORK = REPOSITORY / "outputs" / "preferences"
PAGE, RESULTS_FILE = EVIDENCE / "preferences.md", RESULTS / "preferences.jsonl"
SOURCE = REPOSITORY / "recipes/smollm2-135m/tool_calls/train.jsonl"
STEPS, BATCH, HELD_OUT = 10, 4, 4  # one epoch; pairs or judged answers of a step; rows
MAX_LENGTH = 512  # no row is as long
SENTENCES, SPREAD, MOST = 2, 0.8, 8  # median, standard deviation of the logarithm, and limit of a row's sentences
SHARED: Row = {"optim": "adamw_torch_fused", "bf16": False, "seed": 1}
LEARNING_RATE = {False: 1e-5, True: 1e-3}  # of the real model, and of the tiny one, which is random
ADAM = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8}


class Run(NamedTuple):
    """One objective. rows: pairs, judged or answers; keys: of a recipe's training section; trainer, config: of TRL's

    batch: rows of a step; same_others: whether TRL's KTO reads the same answers of other rows as train.py
    """

    rows: str
    keys: Row
    trainer: str
    config: Row
    same_others: bool = False
    batch: int = BATCH


def _dpo(objective: str, loss_type: str, **keys: Any) -> Run:
    named = {"loss_type": loss_type} if objective == "dpo" else {}
    return Run("pairs", {"objective": objective, "beta": 0.1, **named, **keys}, "DPO",
               {"beta": 0.1, "loss_type": [loss_type], "precompute_ref_log_probs": True, **keys})  # fmt: skip


def _kto(loss_type: str, same_others: bool = False) -> Run:
    early = {"precompute_ref_log_probs": not same_others}  # TRL would have computed its own others' by then
    return Run("judged", {"objective": "kto", "beta": 0.1, "loss_type": loss_type, **early}, "KTO",
               {"beta": 0.1, "loss_type": loss_type, **early}, same_others)  # fmt: skip


# Both compute the reference's log-probabilities before the first step, which is train.py's default.
RUNS = {
    "dpo": _dpo("dpo", "sigmoid"),
    "hinge": _dpo("dpo", "hinge"),
    "robust": _dpo("dpo", "robust", label_smoothing=0.1),
    "apo_zero": _dpo("dpo", "apo_zero"),
    "apo_down": _dpo("dpo", "apo_down"),
    "ipo": _dpo("ipo", "ipo"),
    "kto": _kto("kto"),
    "kto_same_others": _kto("kto", same_others=True),
    "apo_zero_unpaired": _kto("apo_zero_unpaired"),
    "orpo": Run("pairs", {"objective": "orpo", "beta": 0.1}, "ORPO", {"beta": 0.1}),
    "simpo": Run("pairs", {"objective": "simpo", "beta": 2.0, "simpo_gamma": 0.5}, "CPO",
                 {"beta": 2.0, "simpo_gamma": 0.5, "loss_type": "simpo", "cpo_alpha": 0.0}),
    "sft": Run("answers", {"objective": "sft"}, "SFT", {}, batch=2 * BATCH),  # as many answers as of pairs
    # Not with the tokenizer's own padding, which is eos: TRL would read the score before it.
    "reward": Run("pairs", {"objective": "reward"}, "Reward", {"pad_token": "<|endoftext|>"}),
}  # fmt: skip
MEASURED = ("dpo", "kto", "orpo")
SHORT = (*MEASURED, "sft")
TITLES = {"dpo": "DPO, pairs", "kto": "KTO, judged answers", "orpo": "ORPO, pairs", "sft": "SFT, answers"}
OF_SHORT = "-short"  # at the end of a name of results: rows of one sentence
FIGURES = (
    *("loss", "grad_norm", "kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    *("logps/chosen", "logps/rejected"),
)
OURS, PLAIN, TRL = "ours", "plain", "trl"
NAMES = {OURS: "Brigade", PLAIN: "plain loop", TRL: "TRL"}


# ---- the data ------------------------------------------------------------------------------------------------------
def rows_of(kind: str, count: int, single: bool = False) -> list[Row]:
    """Return pairs, answers, or judged answers, of which two in three are good. single: a row has one sentence"""
    draw = random.Random(0)
    sizes = [
        1 if single else round(min(MOST, max(1.0, SENTENCES * draw.lognormvariate(0, SPREAD)))) for _ in range(count)
    ]
    chats = iter([json.loads(line)["messages"] for line in SOURCE.read_text().splitlines()[: sum(sizes)]])
    texts = []
    for size in sizes:
        parts = [next(chats) for _ in range(size)]
        asked, answered = (" ".join(part[at]["content"] for part in parts) for at in (1, 2))
        texts.append((asked + "\n", answered))
    pairs: list[Row] = [
        {"prompt": prompt, "chosen": answer, "rejected": texts[at - 1][1]} for at, (prompt, answer) in enumerate(texts)
    ]
    if kind == "pairs":
        return pairs
    if kind == "answers":
        return [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    return [
        {"prompt": pair["prompt"], "completion": pair["chosen" if at % 3 else "rejected"], "label": bool(at % 3)}
        for at, pair in enumerate(pairs)
    ]


def write_rows(path: Path, rows: Iterable[Row]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def build(run: Run, tiny: bool, short: bool = False) -> Row:
    """Write a run's rows, and those in the order in which train.py draws them.

    Returns {"rows", "train", "heldout", "drawn", "model"}: the training rows, and where all lie; {"learning_rate"}; and
    {"others"}: of each drawn row the one, by its place among them, whose answer KTO reads with this row's prompt.
    """
    import numpy as np

    from brigade.train.data.sampling import GlobalBatches
    from brigade.train.model.location import location
    from brigade.train.recipe import flags
    from testing.runs import write_model

    WORK.mkdir(parents=True, exist_ok=True)
    kind = run.rows
    every = rows_of(kind, STEPS * run.batch + HELD_OUT, single=tiny or short)
    rows, heldout = every[:-HELD_OUT], every[-HELD_OUT:]
    order = GlobalBatches(len(rows), run.batch, 1, 0, 1, SHARED["seed"]).order().flatten()
    recipe = as_flags(recipe=str(REPOSITORY / "recipes/smollm2-135m/full.yaml"))
    model = str(write_model(WORK / "tiny", "llama")) if tiny else location(flags.load(recipe))
    cycle = np.random.default_rng(0).permutation(len(rows))
    following, places = np.empty_like(cycle), np.argsort(order)
    following[cycle] = np.roll(cycle, -1)
    return {
        "learning_rate": LEARNING_RATE[tiny],
        "others": places[following[order]].tolist(),
        "rows": rows,
        "train": write_rows(WORK / f"{kind}.jsonl", rows),
        "heldout": write_rows(WORK / f"{kind}-heldout.jsonl", heldout),
        "drawn": write_rows(WORK / f"{kind}-drawn.jsonl", (rows[place] for place in order)),
        "model": with_head(model) if run.trainer == "Reward" else model,
    }


def with_head(model: str) -> str:
    """Return the directory of a model with a head that scores, whose weights are random and the same each time."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = WORK / "scoring"
    torch.manual_seed(SHARED["seed"])
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return str(folder)


# ---- one run -------------------------------------------------------------------------------------------------------
def ours(run: Run, data: Row) -> Row:
    """One run of train.py: {"history", "seconds", "peak_memory_gib", "others"}, of all steps but the first where seconds."""
    output = WORK / "ours"
    shutil.rmtree(output, ignore_errors=True)  # a finished run would not run again
    recipe = {
        "model": {"model_name_or_path": data["model"]},
        "data": {
            "train_file": data["train"],
            "validation_file": data["heldout"],
            "chat_template": "none",
            "max_length": MAX_LENGTH,
        },
        "training": {
            "global_batch_size": run.batch,
            "per_device_train_batch_size": run.batch,
            "max_steps": STEPS,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "eval_answers": 0,
            "save_steps": None,
            "report_to": [],
            "report_page": False,
            "learning_rate": data["learning_rate"],
            **SHARED,
            **ADAM,
        },
    }
    (WORK / "ours.yaml").write_text(json.dumps(recipe, indent=1))  # JSON is YAML
    words = as_flags(recipe=str(WORK / "ours.yaml"), output_dir=str(output), **run.keys)
    others = peers._run([sys.executable, "train.py", *words], WORK / "ours.log")
    state = json.loads((output / "trainer_state.json").read_text())
    history = [entry for entry in state["log_history"] if "loss" in entry]
    shutil.rmtree(output)
    return {
        "history": history,
        "seconds": sum(entry["step_time"] for entry in history[1:]),
        "peak_memory_gib": max(entry["peak_memory_gib"] for entry in history),
        "others": others,
    }


def trl(run: Run, data: Row) -> Row:
    """One run of TRL's: as of ours()."""
    job = SHARED | {
        "learning_rate": data["learning_rate"],
        "trainer": run.trainer,
        "config": run.config,
        "model": data["model"],
        "train": data["drawn"],
        "others": data["others"] if run.same_others else None,
        "max_length": MAX_LENGTH,
        "micro_batch": run.batch,
        "accumulation": 1,
        "steps": STEPS - 1,  # after the first, which is not timed
        "arguments": {"train_sampling_strategy": "sequential", **ADAM},
        "output": str(WORK / "trl"),
        "result": str(WORK / "trl.result.json"),
    }
    (WORK / "trl.json").write_text(json.dumps(job, indent=1))
    command = [str(peers.PEERS / "bin" / "python"), "-m", "benchmarks.preferences_trl", str(WORK / "trl.json")]
    others = peers._run(command, WORK / "trl.log")
    return json.loads(Path(job["result"]).read_text()) | {"others": others}


def plain(run: Run, data: Row) -> Row:
    """The plain loop's history, in a process of its own: the next ones would inherit this one's peak memory."""
    from testing import plain_preferences

    keys = run.keys | ADAM | {"learning_rate": data["learning_rate"], "seed": SHARED["seed"]}
    keys.pop("precompute_ref_log_probs", None)
    sizes = {"max_length": MAX_LENGTH, "global_batch_size": BATCH, "max_steps": STEPS, "validation_split": None}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        done = pool.submit(plain_preferences.train, data["rows"], data["model"], data["model"], **keys | sizes)
        return {"history": done.result()}


PROGRAMS = {OURS: ours, PLAIN: plain, TRL: trl}


# ---- what is printed -----------------------------------------------------------------------------------------------
def losses(results: dict[str, Row]) -> str:
    """Each step's loss of each program, and its difference to that of the first."""
    columns = {name: [entry["loss"] for entry in result["history"]] for name, result in results.items()}
    first, *rest = columns
    head = ["step", *(NAMES[name] for name in columns), *(f"{NAMES[name]} - {NAMES[first]}" for name in rest)]
    lines = [
        [
            step + 1,
            *(f"{column[step]:.6f}" for column in columns.values()),
            *(f"{columns[name][step] - columns[first][step]:.1e}" for name in rest),
        ]
        for step in range(STEPS)
    ]
    return markdown(head, lines)


def agreement(results: dict[str, Row]) -> str:
    """The largest difference of each figure to that of the first program: at the first step, and at any."""
    histories = {name: result["history"] for name, result in results.items()}
    first, *rest = histories
    lines = []
    for key in (key for key in FIGURES if all(key in history[0] for history in histories.values())):
        for name in rest:
            pairs = zip(histories[first], histories[name], strict=True)
            differences = [abs(own[key] - other[key]) for own, other in pairs if key in own and key in other]
            lines.append([key, NAMES[name], f"{differences[0]:.1e}", f"{max(differences):.1e}"])
    return markdown(["", f"beside {NAMES[first]}", "difference at step 1", "at any step"], lines)


def odds(results: dict[str, Row], beta: float) -> str:
    """ORPO's other term at the first step, which TRL logs; of the others it is what the likelihood leaves of the loss."""
    terms = []
    for name, result in results.items():
        entry = result["history"][0]
        likelihood = entry["rewards/chosen"] / beta
        term = -entry["log_odds_ratio"] if "log_odds_ratio" in entry else (entry["loss"] + likelihood) / beta
        terms.append(f"{NAMES[name]} {term:.6f}")
    return f"The odds ratio's term at step 1: {', '.join(terms)}."


def tables() -> dict[str, str]:
    """Return the page's tables of both kinds of rows, where results have all of their lines: a table is written as a whole."""
    rows = read(RESULTS_FILE) if RESULTS_FILE.exists() else []
    lines = {
        "preferences-speed": {name: TITLES[name] for name in MEASURED},
        "preferences-short": {name + OF_SHORT: TITLES[name] for name in SHORT},
    }
    there = {row["name"] for row in rows}
    whole = {name: titles for name, titles in lines.items() if titles.keys() <= there}
    return {name: side_by_side.table(rows, titles, NAMES[TRL]) for name, titles in whole.items()}


def measure(name: str, programs: list[str], rounds: int, patient: bool, tiny: bool, short: bool) -> None:
    """Run one objective, and print its tables. patient: wait before each run until the machine is quiet, and keep the rates"""
    run = RUNS[name]
    data = build(run, tiny, short)
    results = {program: plain(run, data) for program in programs if program == PLAIN and run.rows != "answers"}
    timed: dict[str, list[Row]] = {program: [] for program in programs if program != PLAIN}
    for _ in range(rounds):
        for program, rows in timed.items():
            if patient:
                peers.wait_until_quiet()
            rows.append(PROGRAMS[program](run, data))
    results |= {program: rows[0] for program, rows in timed.items()}
    print(f"\n## {name}\n\n{losses(results)}\n\n{agreement(results)}\n", flush=True)
    if name == "orpo":
        print(f"{odds(results, run.keys['beta'])}\n")
    if timed and not tiny:
        measured = side_by_side.rows_of(name + OF_SHORT * short, timed, run.batch * (STEPS - 1))
        print(side_by_side.table(measured, {name + OF_SHORT * short: TITLES.get(name, name)}, NAMES[TRL]), flush=True)
        if patient and len(timed) > 1 and name in TITLES:
            side_by_side.keep(RESULTS_FILE, measured)
            write(PAGE, tables())
    WORK.joinpath(f"{name}.results.json").write_text(json.dumps(results | {"rounds": timed}, indent=1))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=RUNS,
        help="objectives (default: dpo kto orpo, with --short also sft, with --tiny all)",
    )
    parser.add_argument("--without", nargs="+", choices=PROGRAMS, default=[], help="programs that are left out")
    parser.add_argument("--rounds", type=int, default=5, help="a figure is their median (default: 5)")
    parser.add_argument("--losses", action="store_true", help="one round, which does not wait for a quiet machine")
    parser.add_argument("--short", action="store_true", help="rows of one sentence each")
    parser.add_argument("--tiny", action="store_true", help="one round on a tiny random model")
    options = parser.parse_args()
    if TRL not in options.without:
        peers.prepare_peers()
    print(f"{machine()}; fp32, {STEPS} steps of {BATCH}, of SFT {RUNS['sft'].batch}.")
    programs = [program for program in PROGRAMS if program not in options.without]
    once = options.losses or options.tiny
    for name in options.only or (RUNS if options.tiny else SHORT if options.short else MEASURED):
        measure(name, programs, 1 if once else options.rounds, patient=not once, tiny=options.tiny, short=options.short)


if __name__ == "__main__":
    main()

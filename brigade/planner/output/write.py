"""Recipes that the planner writes: `plan MODEL ... --write`, and `plan --headers`, which writes all headers anew."""

import tempfile
from pathlib import Path
from typing import Any

import yaml

from ...errors import UserError
from ...errors.console import billions, figure
from ...model.config_json import read_config
from ...recipe.files import REPOSITORY
from ...recipe.method import METHODS
from ..choice.job import Job
from ..choice.job_of_recipe import BESIDE, Source, here, source_of
from ..choice.search import Candidate, Workload
from ..costs.host_memory import host
from ..models.find_model import RECIPES, config_of
from .header import Planned, header, load, replaced

# Per method and size in parameters: what a first run takes. Adapters take ten times the rate of all weights
# (thinkingmachines.ai/blog/lora), and large models less than small ones.
RATES = {
    "full": ((2e9, 2e-5), (1e12, 1e-5)),
    "lora": ((2e10, 2e-4), (1e12, 1e-4)),
    "qlora": ((2e10, 2e-4), (1e12, 1e-4)),
}
FLAGS: dict[str, dict[str, Any]] = {
    "torch": {},
    "torch.compile": {"torch_compile": True},
    "Liger": {"use_liger_kernel": True},
}
COMMENTS = {
    "dataset_name": "multi-turn chats; any set with a `messages` column does",
    "save_total_limit": "a checkpoint takes {checkpoint}",
    "hostfile": "one host",
}
TEMPLATES = {
    True: "a base model has none; its tokenizer has the tokens (docs/data.md)",
    False: "renders as the model's own, which has no generation marks (docs/data.md)",
}
# A base model has not learned the tokens of its family's chat template, and adapters leave embeddings as they are.
ORDINARY = "tulu"
OVERVIEW = RECIPES / "README.md"


def strategy_keys(candidate: Candidate, nodes: int) -> dict[str, Any]:
    """Keys of a recipe's `cluster:` that name the strategy: a file of ours, or where none fits the cluster what it would say."""
    job, file = candidate.estimate.job, candidate.choice.file
    if file not in ("fsdp2", "hsdp"):
        return {"ds_config": file} if file else {}
    path = f"accelerate_configs/{file}_{nodes}x{job.node_size}.yaml"
    if (REPOSITORY / path).is_file():
        return {"accelerate_config": path}
    document: dict[str, Any] = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
    if file == "hsdp":
        document["parallelism_config"] = {"dp_replicate_size": nodes, "dp_shard_size": job.node_size}
    return {"accelerate_config": document}


def recipe_of(candidate: Candidate, workload: Workload, source: Source, hostfile: str | None) -> dict[str, Any]:
    """The recipe's keys and values."""
    job = candidate.estimate.job
    model: dict[str, Any] = {"model_name_or_path": source.hub}
    if source.revision:
        model["revision"] = source.revision
    if job.method != "full":
        model |= dict.fromkeys(METHODS[workload.method].keys, True)
        model |= {"lora_r": workload.rank, "lora_alpha": 2 * workload.rank, "lora_target_modules": "all-linear"}
        if workload.whole:
            model["lora_modules_to_save"] = list(workload.whole)
    data: dict[str, Any] = {"dataset_name": "trl-lib/Capybara"}
    if source.template:
        ordinary = source.base and job.method != "full" and not workload.whole
        data["chat_template"] = ORDINARY if ordinary else source.template
    rate = next(rate for size, rate in RATES[job.method] if job.shape.parameters < size)
    training: dict[str, Any] = {
        "global_batch_size": workload.batch,
        "per_device_train_batch_size": job.micro_batch,
        "per_device_eval_batch_size": job.micro_batch,
        "num_train_epochs": 1,
        **({"optim": job.optimizer} if job.optimizer != Job.optimizer else {}),
        "learning_rate": rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,
        "bf16": True,
        "activation_checkpointing": job.checkpointing == "full",
        **FLAGS[candidate.kernels],
        "logging_steps": 10,
        "eval_steps": 50,
        "save_steps": 50,
    }
    if host(job).checkpoint > 1e11:
        training["save_total_limit"] = 1
    nodes = job.gpus // job.node_size
    cluster = {"hostfile": hostfile, "gpu": candidate.estimate.gpu.kind} | strategy_keys(candidate, nodes)
    return {
        "model": model,
        "data": data | {"max_length": workload.length, "packing": True},
        "training": training,
        "cluster": cluster,
    }


def body(recipe: dict[str, Any], source: Source, job: Job) -> str:
    """The recipe as YAML, a blank line between sections, with comments where a value wants one."""
    size = host(job).checkpoint
    ordinary = recipe["data"].get("chat_template") == ORDINARY
    comments = COMMENTS | {
        "chat_template": "of words that a base model knows (docs/data.md)" if ordinary else TEMPLATES[source.base]
    }
    comments["save_total_limit"] = comments["save_total_limit"].format(
        checkpoint=f"{size / 1e12:.1f} TB" if size >= 1e12 else f"{figure(size / 1e9, 0)} GB"
    )
    if recipe["cluster"]["hostfile"]:
        comments["hostfile"] = ""
    lines = []
    for section, values in recipe.items():
        lines += ["", f"{section}:"]
        for key, value in values.items():
            text = yaml.safe_dump({key: value}, default_flow_style=True, width=10_000, sort_keys=False).strip()[1:-1]
            text = f"  {key}: {value:.1e}".replace("e-0", "e-") if key == "learning_rate" else f"  {text}"
            lines.append(f"{text:<40} # {comments[key]}" if comments.get(key) else text)
    return "\n".join(lines) + "\n"


def write(candidate: Candidate, workload: Workload, model: str, to: Path, hostfile: str | None) -> list[Path]:
    """Write the recipe to `to` (a folder gets METHOD.yaml) and the config.json of `model` beside it; returns what it wrote.

    Raises UserError, before anything is written, where a file of another content is in the way, and of sequences longer than the
    model's positions.
    """
    source, config = source_of(model), config_of(model)
    path = to if to.suffix in (".yaml", ".yml") else to / f"{workload.method}.yaml"
    job = candidate.estimate.job
    if job.shape.other:
        raise UserError(
            "flag --write",
            f"{job.shape.name} carries a vision tower, which a run freezes and the planner counts as if it were trained",
            "take one of text alone, or write the recipe by hand and rehearse it",
        )
    document = read_config(config)
    positions = (document.get("text_config") or document).get("max_position_embeddings")
    if positions and workload.length > positions:
        problem = f"{workload.length} tokens, but {job.shape.name} has positions for {positions}"
        raise UserError("flag --max_length", problem, f"give at most --max_length {positions}")
    text = body(recipe_of(candidate, workload, source, hostfile), source, job)
    beside, published = path.with_name(BESIDE), config.read_bytes()
    there = path.exists()
    if beside.exists() and beside.read_bytes() != published:
        raise _in_the_way(beside, f"name another folder: --write {path.parent}-2/")
    if there and (not path.is_file() or replaced(path.read_text(), "") != text):
        raise _in_the_way(path, f"remove it, or name another file: --write {path.with_name(f'{path.stem}-2.yaml')}")
    with tempfile.TemporaryDirectory() as folder:  # the header is made from what a run would read
        draft = Path(folder) / path.name
        draft.write_text(text, encoding="utf-8")
        draft.with_name(BESIDE).write_bytes(published)
        text = header(load(draft, job.link, path)) + text
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(published)
        if there:
            return []
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            str(path), f"it cannot be written: {error.strerror}", "name another folder with --write"
        ) from None
    return [path, beside]


def _in_the_way(path: Path, cure: str) -> UserError:
    return UserError(here(path), "it is there already with other content, and is not overwritten", cure)


# ---- all headers ----
def planned_recipes() -> list[Planned]:
    """Every recipe of ours that names a GPU, small models first. One that names none (recipes/tiny) runs anywhere."""
    found = [load(path) for path in sorted(RECIPES.glob("*/*.yaml"))]
    kept = [planned for planned in found if planned.settings.recipe.cluster.gpu]
    return sorted(kept, key=lambda p: (p.estimate.job.shape.parameters, p.estimate.job.gpus, p.path))


def overview(planned: list[Planned]) -> str:
    """recipes/README.md."""
    lines = [
        "# Recipes",
        "",
        "Memory, speed and days are the planner's estimates, not measured; each recipe's header has them in parts and with their",
        "intervals. `python -m brigade plan --headers` writes this page and all headers, `--check` says which of them are out of",
        "date. `python -m brigade plan MODEL --hostfile HOSTS --gpu KIND --method METHOD` prints the figures for any other model",
        "and cluster, and `--write recipes/NAME/` makes a recipe of them.",
        "",
        "These recipes are careful: they compile no layers, as no GPU has shown here what that brings, and several leave memory",
        "for longer sequences. For the same cluster `plan` may choose something faster by formula.",
        "",
        "| model | parameters | trains | on | strategy | GiB of a GPU | tokens/s/GPU | days per 10⁹ tokens | recipe |",
        "|---|--:|---|---|---|--:|--:|--:|---|",
    ]
    for one in planned:
        result, shape = one.estimate, one.estimate.job.shape
        active = f", {shape.active / 1e9:.1f} B active" if shape.experts else ""
        trains = "all weights" if result.job.method == "full" else result.job.title
        name = one.path.removeprefix("recipes/")
        lines.append(
            f"| {one.source.name} | {billions(shape.parameters)}{active} | {trains} | {one.cluster} | {one.strategy_name} "
            f"| {result.device_gib:.0f} of {result.gpu.memory_gib:.0f} | {result.tokens_per_second_per_gpu:,.0f} "
            f"| {one.estimate.days:.2f} | [{name}]({name}) |"
        )
    lines += ["", "[tiny/full.yaml](tiny/full.yaml) trains 2 million parameters from scratch, on anything.", ""]
    return "\n".join(lines)


def refresh(check: bool) -> list[str]:
    """Write all headers and recipes/README.md anew, or only look; returns what was (or would be) changed."""
    planned, changed = planned_recipes(), []
    texts = {one.settings.recipe_path: replaced(one.settings.recipe_path.read_text(), header(one)) for one in planned}
    for path, text in {**texts, OVERVIEW: overview(planned)}.items():
        if not path.is_file() or path.read_text() != text:
            changed.append(here(path))
            if not check:
                path.write_text(text, encoding="utf-8")
    return changed

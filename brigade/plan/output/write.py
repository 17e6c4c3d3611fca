"""Write recipes: `plan MODEL ... --write`, and `plan --headers`, which writes all headers anew."""

import math
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import yaml

from ...errors import UserError
from ...errors.console import billions, figure
from ...errors.tables import Document, Fields, table
from ...train.host.files import write as write_file
from ...train.model.config_json import read_config
from ...train.model.rope import positions_by
from ...train.recipe.files import REPOSITORY
from ...train.recipe.method import METHODS
from ...train.recipe.objectives import SFT
from ..choice import job_of_recipe
from ..choice.goals import TOKENS, own_tokens
from ..choice.workload import WITH_LIGER, Candidate, Workload
from ..costs.host_memory import host
from ..costs.job import Job
from ..shape.find import RECIPES, config_of, positions_of, stretches
from .show_recipe import header, replaced
from .strategy_file import as_document, hosts_file, ours, strategy_file

FIRST_RUN = table(Path(__file__).with_name("first_run.yaml"))
CHATS = "trl-lib/Capybara"
LONG = 1.0  # hours
TEMPLATE = Path(__file__).with_name("recipe_template.txt")
OVERVIEW = RECIPES / "README.md"
RULE = "|---|--:|---|---|---|--:|--:|--:|---|"  # under the head of its table


def body(
    candidate: Candidate,
    workload: Workload,
    source: job_of_recipe.PublishedModel,
    hostfile: str | None,
    strategy: Document,
    rope: Document | None = None,
) -> str:
    """Return the recipe as YAML: the template without the lines that name what this recipe does not say.

    strategy: keys of its `cluster:` that name it; rope: of its `model:`, where rows are longer than the model's positions
    """
    job, adapters = candidate.estimate.job, workload.method != "full"
    size = host(job).checkpoint
    ordinary = source.base and adapters and not workload.whole
    values: Fields = {
        "hub": source.hub,
        "revision": source.revision,
        "rope_parameters": rope,
        **dict.fromkeys(METHODS[workload.method].keys, True),
        "lora_r": workload.rank if adapters else None,
        "lora_alpha": 2 * workload.rank if adapters else None,
        "lora_target_modules": "all-linear" if adapters else None,
        "lora_modules_to_save": list(workload.whole) or None,
        # A base model has not learned the tokens of its family's template, and adapters leave embeddings as they are.
        "chat_template": "tulu" if ordinary and source.template else source.template,
        "objective": workload.objective if workload.objective != SFT else None,
        "max_length": workload.length,
        "global_batch_size": workload.batch,
        "micro_batch": job.micro_batch,
        "bf16": candidate.estimate.gpu.bf16 or None,
        "fp16": not candidate.estimate.gpu.bf16 or None,
        "optim": job.optimizer if job.optimizer != Job.optimizer else None,
        "activation_checkpointing": job.checkpointing == "full",
        "torch_compile": candidate.kernels == "torch.compile" or None,
        "compile_by_proof": _leaves_compiling(candidate, workload),
        "use_liger_kernel": candidate.kernels in WITH_LIGER or (None if workload.images else "auto"),
        "tiled_loss": job.loss == "tiled" or None,
        "save_total_limit": 1 if size > 1e11 else None,
        "hostfile": hostfile,
        "gpu": candidate.estimate.gpu.kind,
        "network": job.link or None,
        **strategy,
    }
    texts = {
        name: yaml.safe_dump([value], default_flow_style=True, width=10_000, sort_keys=False).strip()[1:-1]
        for name, value in values.items()
        if value is not None
    }
    of_base = "of words that a base model knows" if ordinary else "a base model has none; its tokenizer has the tokens"
    texts["why_template"] = of_base if source.base else "renders as the model's own, which has no generation marks"
    asked = candidate.kernels in WITH_LIGER
    proven = "where this host's GPUs prove them faster (docs/gpu.md)"
    texts["why_liger"] = "as `plan --liger` counts" if asked else proven
    texts |= _of_answers(job) if workload.objective == SFT else _of_preferences(workload)
    texts["checkpoint"] = f"{size / 1e12:.1f} TB" if size >= 1e12 else f"{figure(size / 1e9, 0)} GB"
    texts |= {} if hostfile else {"no_hostfile": "null"}
    lines = []
    for line in TEMPLATE.read_text().splitlines():
        if set(re.findall(r"{(\w+)}", line)) <= texts.keys():
            entry, mark, comment = line.format(**texts).partition(" # ")
            lines.append(f"{entry:<40}{mark}{comment}" if mark else entry)
    return "\n".join(lines) + "\n"


def _leaves_compiling(candidate: Candidate, workload: Workload) -> str | None:
    """Return "auto" where compiled layers were compared with plain ones (docs/evidence/compiled.md), and the recipe's own data
    take so long that the minutes of compiling may pay."""
    choice, shape = candidate.choice, workload.shape
    in_pieces = choice.engine == "zero" and choice.stage == 3
    beyond = any((choice.axes, choice.offload, in_pieces, workload.images, workload.objective != SFT))
    beyond = beyond or any((shape.experts, shape.mixer, shape.sizes))
    short = candidate.kernels == "torch.compile" or candidate.estimate.hours(TOKENS[CHATS]) < LONG
    return None if beyond or short else "auto"


def _of_answers(job: Job) -> dict[str, str]:
    rate = next(rate for most, rate in FIRST_RUN["answers"][job.method] if job.shape.parameters < most)
    packing = {"packing": "true"} if job.packed else {"not_masked": "false"}
    return packing | {"chats": CHATS, "learning_rate": rate, "warmup": "0.05"}


def _of_preferences(workload: Workload) -> dict[str, str]:
    """Return what the template says of preferences. A sequence is one pair or answer: packed, steps would have more or fewer."""
    data, rates = FIRST_RUN["data"][workload.comparison.rows], FIRST_RUN["rates"][workload.objective]
    rate = rates["full" if workload.method == "full" else "adapters"]
    texts = {"preferences": data["dataset"], "columns": data["columns"]}
    return texts | {"preference_rate": rate, "why_rate": rates["source"], "warmup": "0.1"}


def strategy_keys(candidate: Candidate) -> Fields:
    """Return the keys of a recipe's `cluster:` that name the strategy: a file of ours, or what it would say if there is none."""
    job, file = candidate.estimate.job, candidate.choice.file
    if not job.axes and (not file or file.endswith(".json")):
        return {"ds_config": file or None}
    path = f"accelerate_configs/{file}_{job.nodes}x{job.node_size}.yaml"
    shipped = not job.axes and (REPOSITORY / path).is_file()
    return {"accelerate_config": path if shipped else as_document(candidate)}


def rope_for(model: str, workload: Workload) -> Document | None:
    """Return the recipe's rope_parameters: those of the model's maker where rows are longer than its positions, else None.

    Raises UserError where the maker names none, or rows are longer than by those.
    """
    document = read_config(config_of(model))
    positions = positions_of(document)
    rope = job_of_recipe.published_model(model).rope_parameters if positions and workload.length > positions else None
    most = positions_by(rope, positions)
    if not most or workload.length <= most:
        return rope
    problem, cure = f"has positions for {most}", f"give at most --max_length {most}"
    if stretches(document) and positions:
        factor = f"{math.ceil(workload.length / positions):.1f}"
        words = f"{{rope_type: yarn, factor: {factor}, original_max_position_embeddings: {positions}}}"
        stretched = f"max_length: {workload.length} and rope_parameters: {words}"
        cure += f"; or write that recipe, give it {stretched}, and plan it"
        problem += ", and its maker names no stretch beyond them"
    raise UserError("flag --max_length", f"{workload.length} tokens, but {workload.shape.name} {problem}", cure)


def recipe_path(to: Path, method: str) -> Path:
    """Return where --write puts a recipe: in the file that it names, or as METHOD.yaml in that folder."""
    return to if to.suffix in (".yaml", ".yml") else to / f"{method}.yaml"


def write(candidate: Candidate, workload: Workload, model: str, to: Path, hostfile: str | None) -> list[Path]:
    """Write the recipe to `to` (a folder gets METHOD.yaml), the config.json of `model` beside it, a file for a strategy with axes
    besides data parallelism, and a hostfile where the candidate takes fewer hosts or slots; returns what it wrote.

    Raises UserError, before anything is written, where a file of another content is in the way, and of sequences longer than the
    model's positions.
    """
    source, config = job_of_recipe.published_model(model), config_of(model)
    path = recipe_path(to, workload.method)
    job = candidate.estimate.job
    rope = rope_for(model, workload)
    file = strategy_file(candidate, job_of_recipe.here(path), path.parent, hostfile)
    if file and ours(path.parent) and not file.path.exists():  # a recipe of ours says what no file there is for
        file = None
    strategy = {file.key: job_of_recipe.here(file.path)} if file else strategy_keys(candidate)
    hosts = hosts_file(candidate, path.parent, hostfile)
    text = body(candidate, workload, source, job_of_recipe.here(hosts.path) if hosts else hostfile, strategy, rope)
    there, files = path.exists(), {path.with_name(job_of_recipe.BESIDE): config.read_bytes()}
    if hosts:
        files[hosts.path] = hosts.text.encode()
    shared = file and file.path.exists() and file.path.parent != path.parent.resolve()  # and taken as it is
    if file and not shared:
        files[file.path] = file.text.encode()
    for name, content in files.items():
        if name.exists() and name.read_bytes() != content:
            raise _in_the_way(name, f"name another folder: --write {path.parent}-2/")
    if there and (not path.is_file() or replaced(path.read_text(), "") != text):
        raise _in_the_way(path, f"remove it, or name another file: --write {path.with_name(f'{path.stem}-2.yaml')}")
    with tempfile.TemporaryDirectory() as folder:  # the header is made from what a run would read
        draft, drafted = Path(folder) / path.name, text
        for name, content in files.items():
            draft.with_name(name.name).write_bytes(content)
        for name in files:
            drafted = drafted.replace(job_of_recipe.here(name), str(draft.with_name(name.name)))
        draft.write_text(drafted, encoding="utf-8")
        text = (
            header(job_of_recipe.load_plan(draft, job.link, path)).replace(folder, job_of_recipe.here(path.parent))
            + text
        )
    missing = {name: content for name, content in files.items() if not name.exists()}
    if not there:
        missing = {path: text.encode()} | missing
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for name, content in missing.items():
            write_file(name, content)
    except OSError as error:
        problem = f"it cannot be written: {error.strerror}"
        raise UserError(str(path), problem, "name another folder with --write") from None
    return list(missing)


def _in_the_way(path: Path, cure: str) -> UserError:
    return UserError(job_of_recipe.here(path), "it is there already with other content, and is not overwritten", cure)


# ---- all headers ----
def recipe_plans(recipes: Iterable[Path] | None = None) -> list[job_of_recipe.RecipePlan]:
    """Return every recipe of ours that names a GPU, small models first. One that names none (recipes/tiny) runs anywhere.

    recipes: default: those in the folders of models.yaml, for users have their own recipes beside them
    """
    ours = (path for path in sorted(RECIPES.glob("*/*.yaml")) if path.parent.name in job_of_recipe.published_models())
    plans = [job_of_recipe.load_plan(path) for path in (ours if recipes is None else recipes)]
    kept = [plan for plan in plans if plan.settings.recipe.cluster.gpu]
    return sorted(kept, key=lambda plan: (plan.estimate.job.shape.parameters, plan.estimate.job.gpus, plan.path))


def row(plan: job_of_recipe.RecipePlan) -> str:
    """Return a recipe's line of the table in recipes/README.md."""
    result, shape, name = plan.estimate, plan.estimate.job.shape, plan.path.removeprefix("recipes/")
    cells = (
        plan.model.name,
        billions(shape.parameters) + (f", {shape.active / 1e9:.1f} B active" if shape.experts else ""),
        result.job.title,
        plan.cluster,
        plan.strategy_name,
        f"{result.device_gib:.0f} of {result.gpu.memory_gib:.0f}",
        f"{result.tokens_per_second_per_gpu:,.0f}",
        figure(result.hours(own), 2) if (own := own_tokens(plan.settings.recipe)) else "",
        f"[{name}]({name})",
    )
    return f"| {' | '.join(cells)} |"


def refresh(check: bool, recipes: Iterable[Path] | None = None) -> list[str]:
    """Write all headers and the table of recipes/README.md anew, or with `check` only look; return what changed or would."""
    plans, changed = recipe_plans(recipes), []
    texts = {path: replaced(path.read_text(), header(plan)) for plan in plans for path in [plan.settings.recipe_path]}
    head, rule, table = OVERVIEW.read_text().partition(RULE)
    rest = table.lstrip("\n").partition("\n\n")[2]
    texts[OVERVIEW] = "\n".join([f"{head}{rule}", *map(row, plans), "", rest])
    for path, text in texts.items():
        if path.read_text() != text:
            changed.append(job_of_recipe.here(path))
            if not check:
                write_file(path, text)
    return changed

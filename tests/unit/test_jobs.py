"""Every recipe on every hostfile as every kind of job file; what holds for all kinds, and how files are written."""

import shlex
from functools import cache
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brigade.hosts.job import make
from brigade.launch.write import SUFFIXES, dns_name, name, secrets, text, train_words, write
from brigade.train.recipe.files import read_yaml
from brigade.train.recipe.hostfile import read_hostfile
from brigade.train.strategy.accelerate_config import mesh_sizes
from brigade.train.strategy.axis_keys import of_ds_config, of_mesh
from testing.pretended_slurm import NASTY
from testing.shipped import shipped

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("in_the_repository")
RECIPES = [str(path.relative_to(ROOT)) for path in shipped("recipes/*/*.yaml")]
HOSTFILES = [f"hostfiles/{path.name}" for path in shipped("hostfiles/*")]
ANY_MICRO_BATCH = ("--per_device_train_batch_size", "auto")  # then only the global batch must divide
ZERO3 = ("--ds_config", "ds_configs/zero3.json")
STRATEGIES = ("ds_config", "accelerate_config")


@cache
def ranks(hostfile):
    return sum(read_hostfile(ROOT / hostfile).values())


@cache
def document_of(recipe):
    return read_yaml(ROOT / recipe)


def fits(recipe, hostfile):
    document, count = document_of(recipe), ranks(hostfile)
    axes = axes_of(document.get("cluster") or {})
    return not count % axes.unit and not document["training"]["global_batch_size"] % axes.data(count)


def axes_of(cluster):
    """Those of a strategy that stands in the recipe itself."""
    ds_config, accelerate = (said if isinstance(said, dict) else {} for said in map(cluster.get, STRATEGIES))
    return of_ds_config(ds_config) if ds_config else of_mesh(mesh_sizes(accelerate.get("parallelism_config") or {}))


def one_hostfile_each():
    """Every recipe with one of the hostfiles that it fits, and every hostfile with some recipe."""
    pairs, used = [], dict.fromkeys(HOSTFILES, 0)
    for recipe in RECIPES:
        hostfile = min((name for name in HOSTFILES if fits(recipe, name)), key=used.__getitem__)
        used[hostfile] += 1
        pairs.append((recipe, hostfile))
    return pairs


PAIRS = one_hostfile_each()


def job(recipe="recipes/qwen3-8b/full.yaml", *flags, hosts=None, hostfile="hostfiles/2x8"):
    return make(recipe, list(flags), hostfile, hosts)


def comments(file_text):
    """The lines before the first one that is no comment."""
    lines = file_text.splitlines()
    return lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]


def test_all_recipes_and_most_hostfiles_are_tried():
    assert len(PAIRS) >= 9 and {recipe for recipe, _ in PAIRS} == set(RECIPES)
    assert {hostfile for _, hostfile in PAIRS} >= {"hostfiles/1x8", "hostfiles/2x8", "hostfiles/4x8", "hostfiles/16x8"}


@pytest.mark.parametrize("kind", SUFFIXES)
@pytest.mark.parametrize("recipe, hostfile", PAIRS)
def test_every_recipe_on_every_hostfile(kind, recipe, hostfile):
    made = job(recipe, *ANY_MICRO_BATCH, hostfile=hostfile)
    file_text = text(kind, made)
    head = comments(file_text)
    first = head[1 if kind == "sbatch" else 0]
    assert f"{ranks(hostfile)} ranks" in first and made.strategy.name in first
    command = f"python -m brigade launch {recipe} --hostfile {hostfile} --write {kind} {' '.join(ANY_MICRO_BATCH)}"
    assert f"# Written by: {command}" in head
    assert any(line.startswith(("# Start, ", "# Start: ")) for line in head)
    assert kind == "accelerate" or any(line.startswith("# Change: ") for line in head)
    assert str(ROOT) not in file_text and file_text.endswith("\n")
    assert "{{" not in file_text and "{%" not in file_text
    assert kind == "sbatch" or yaml.safe_load(file_text)
    assert kind == "accelerate" or f"/{made.output_dir.name}" in file_text


@pytest.mark.parametrize("kind", SUFFIXES)
def test_hosts_of_different_sizes_are_refused(kind, mistake):
    message = mistake(text, kind, job(hosts={"node1": 8, "node2": 4, "node3": 4}, hostfile="my_hosts"))
    assert "my_hosts" in message and "4 and 8 slots" in message


@pytest.mark.parametrize("kind", [kind for kind in SUFFIXES if kind != "accelerate"])
@pytest.mark.parametrize("flags", [["--fresh"], ["--resume_from_checkpoint", "outputs/x/checkpoint-5"], ["--rehearse"]])
def test_flags_that_cannot_be_said_twice_are_refused(kind, flags, mistake):
    message = mistake(text, kind, job("recipes/qwen3-8b/full.yaml", *flags))
    assert message.startswith(f"error: flag {flags[0]}") and "leave it out" in message
    assert text("accelerate", job("recipes/qwen3-8b/full.yaml", *flags)), "this file only says where"


def test_job_name_is_recipe_and_topology():
    assert name(job()) == dns_name(job()) == "qwen3-8b-full-2x8"
    small = job("recipes/qwen3-0.6b/full.yaml", hostfile="hostfiles/1x8")
    assert (name(small), dns_name(small)) == ("qwen3-0.6b-full-1x8", "qwen3-0-6b-full-1x8")


@pytest.mark.parametrize("folder", ["My Model (v2)", "7b", "ä" * 30, "x" * 90, "-", "a'b"])
def test_names_are_ones_that_schedulers_take(folder, tmp_path):
    recipe = tmp_path / folder / "full.yaml"
    recipe.parent.mkdir()
    recipe.write_text((ROOT / "recipes/tiny/full.yaml").read_text())
    made = job(str(recipe))
    assert set(name(made)) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
    label = dns_name(made)
    assert label == label.lower() and label.replace("-", "").isalnum() and label[0].isalpha() and label[-1] != "-"
    assert len(label) <= 45 and label.isascii()


@pytest.mark.parametrize(
    "words", [["--output_dir", "a b"], ["--output_dir=a b"], ["--output-dir", "a b"], ["--output-dir=a b"]]
)
def test_the_output_directory_is_said_once(words):
    made = job("recipes/tiny/full.yaml", "--bf16", *words, "--max_steps", "3")
    assert str(made.output_dir) == "a b"
    kept = ["train.py", "--recipe", "recipes/tiny/full.yaml", "--bf16", "--max_steps", "3"]
    assert train_words(made) == kept


def test_output_directory_is_the_one_of_the_run():
    from brigade.train.host.cluster import World
    from brigade.train.run.directory import open_directory

    for made in (job(), job("recipes/tiny/full.yaml", *ZERO3), job("recipes/tiny/full.yaml", "--output_dir", "x/y")):
        world = World(0, 0, made.world_size, 8, "node1", "torchrun")
        assert open_directory(made.settings, made.strategy, world).directory == made.output_dir


@pytest.mark.parametrize("recipe, flags, needed", [
    ("recipes/tiny/full.yaml", [], []), ("recipes/qwen3-8b/full.yaml", [], ["HF_TOKEN"]),
    ("recipes/qwen3-8b/full.yaml", ["--report_to", "wandb"], ["HF_TOKEN", "WANDB_API_KEY"]),
    ("recipes/tiny/full.yaml", ["--report_to", "swanlab"], ["SWANLAB_API_KEY"]),
    ("recipes/tiny/full.yaml", ["--dataset_name", "who/what"], ["HF_TOKEN"]),
    ("recipes/tiny/full.yaml", ["--dataset_name", "x" * 5000], ["HF_TOKEN"]),
    ("recipes/tiny/full.yaml", ["--dataset_name", "null", "--datasets", "[{train_file: a.jsonl}, {dataset_name: who/what}]"],
     ["HF_TOKEN"]),
    ("recipes/smollm2-81m/distill.yaml", [], []),  # its model is made here, and its teacher is a package
    ("recipes/smollm2-81m/distill.yaml", ["--teacher", "who/what"], ["HF_TOKEN"]),
    ("recipes/tiny/full.yaml", ["--model_name_or_path", "outputs/sft"], []),  # which a run before it leaves
])  # fmt: skip
def test_only_secrets_that_the_run_may_need_are_asked_for(recipe, flags, needed, monkeypatch):
    made = job(recipe, *flags)
    assert secrets(made) == needed
    for variable in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "hush-hush")
    for kind in SUFFIXES:
        assert "hush-hush" not in text(kind, made)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    value=st.one_of(
        st.sampled_from([*NASTY, "1e-5"]),
        st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0")),
    )
)
def test_a_flag_may_hold_anything(value):
    word = f"--model_name_or_path=m{value}"  # not the text null, which is none
    made = job("recipes/tiny/full.yaml", word, *ZERO3)
    for kind in ("accelerate", "kubernetes", "skypilot"):
        read = yaml.safe_load(text(kind, made))
        assert "num_nodes" not in read or read["num_nodes"] == 2
    command = yaml.safe_load(text("kubernetes", made))["spec"]["trainer"]["command"]
    assert word in [each.replace("$$", "$") for each in command]
    run = yaml.safe_load(text("skypilot", made))["run"]
    assert word in shlex.split(run)
    script = text("sbatch", made)
    assert f"\ncommand=({shlex.join(train_words(made))} --output_dir" in script
    assert [line for line in comments(script) if line.startswith("#SBATCH --nodes")] == ["#SBATCH --nodes=2"]


def start(file):
    """The line of a job file that says how to start it."""
    return next(line for line in Path(file).read_text().splitlines() if line.startswith(("# Start, ", "# Start: ")))


# ---- writing -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind, file", [
    ("sbatch", "qwen3-8b-full-2x8.sbatch"), ("accelerate", "qwen3-8b-full-2x8.accelerate.yaml"),
    ("kubernetes", "qwen3-8b-full-2x8.trainjob.yaml"), ("skypilot", "qwen3-8b-full-2x8.sky.yaml"),
])  # fmt: skip
def test_write_names_the_file_and_never_overwrites(kind, file, tmp_path, monkeypatch, capsys, mistake):
    made = job()
    monkeypatch.chdir(tmp_path)
    assert write(made, kind) == Path(file) and capsys.readouterr().out.startswith(f"Wrote {file}")
    assert Path(file).read_text() == text(kind, made)
    assert f" {file}" in start(file), "it says how to start itself"
    assert write(made, kind) == Path(file) and "unchanged" in capsys.readouterr().out
    Path(file).write_text("mine")
    message = mistake(write, made, kind)
    other = file.replace("2x8", "2x8-2")
    assert message.startswith(f"error: {file}\n") and f"--to {other}" in message and Path(file).read_text() == "mine"
    assert write(made, kind, Path(other)) == Path(other) and f" {other}" in start(other)
    Path(other).write_text("mine too")
    assert f"--to {file.replace('2x8', '2x8-3')}" in mistake(write, made, kind)


def test_write_to_standard_output(tmp_path, monkeypatch, capsys):
    made = job()
    monkeypatch.chdir(tmp_path)
    write(made, "sbatch", Path("-"))
    assert capsys.readouterr().out == text("sbatch", made) and not list(tmp_path.iterdir())


def test_write_where_nothing_can_be_written(tmp_path, mistake):
    assert "cannot be written" in mistake(write, job(), "sbatch", tmp_path / "no" / "such" / "folder.sbatch")
    assert "not overwritten" in mistake(write, job(), "sbatch", tmp_path)

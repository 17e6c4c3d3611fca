"""TrainJobs against the models of Kubeflow's API, and SkyPilot's tasks parsed by SkyPilot."""

import contextlib
import copy
import json
import os
import re
import subprocess

import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
from test_jobs import ANY_MICRO_BATCH, PAIRS, ROOT, job, text
from torch.distributed.run import get_args_parser

from brigade.launch.write import ACCELERATORS
from brigade.train.recipe.hostfile import read_hostfile
from testing.programs import shellcheck

OF_THE_HOST = ("recipes/tiny", "recipes/smollm2-135m", "recipes/smollm2-81m")  # whose models the Hub is not asked for
SKY = ROOT / ".venv/skypilot/bin/python"


def document(made):
    return yaml.safe_load(text("skypilot", made))


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(ROOT)


# ---- Kubernetes --------------------------------------------------------------------------------------------------
def known(document):
    """What of a manifest the API knows. The models drop unknown fields without a word; here they are missing."""
    return json.loads(TrainerV1alpha1TrainJob.from_dict(document).to_json())


@pytest.mark.parametrize("recipe, hostfile", PAIRS)
def test_the_api_knows_every_field(recipe, hostfile):
    made = job(recipe, *ANY_MICRO_BATCH, hostfile=hostfile)
    manifest = yaml.safe_load(text("kubernetes", made))
    assert known(manifest) == manifest
    hosts = read_hostfile(ROOT / hostfile)
    trainer = manifest["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (len(hosts), 8)
    gpus = made.settings.recipe.cluster.gpu is not None
    assert trainer["resourcesPerNode"] == ({"limits": {"nvidia.com/gpu": "8"}} if gpus else {"requests": {"cpu": "8"}})
    # TrainJob's own rule for its name (trainjob_types.go), and what the runtime tells torchrun by PET_* is not said here.
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", manifest["metadata"]["name"])
    assert trainer["command"][0] == "torchrun"
    read = get_args_parser().parse_args(trainer["command"][1:])
    assert read.training_script == "train.py" and not any(e["name"].startswith("PET_") for e in trainer.get("env", []))
    assert read.training_script_args[-2:] == ["--output_dir", f"/outputs/{made.output_dir.name}"]


@pytest.mark.parametrize("path", [
    "spec.trainer",
    "spec",
    "spec.runtimeRef",
    "spec.runtimePatches.0.trainingRuntimeSpec",
    "metadata",
    "spec.trainer.env.3.valueFrom.secretKeyRef",
])  # fmt: skip
def test_a_field_that_the_api_does_not_know_would_be_seen(path):
    manifest = yaml.safe_load(text("kubernetes", job()))
    block = wrong = copy.deepcopy(manifest)
    for key in path.split("."):
        block = block[int(key)] if key.isdigit() else block[key]
    block["podTemplateOverrides"] = "x"
    assert known(wrong) != wrong


def test_secrets_are_references():
    made = job("recipes/qwen3-8b/full.yaml", "--report_to", "wandb")
    counted, *caches, token, key = yaml.safe_load(text("kubernetes", made))["spec"]["trainer"]["env"]
    assert counted["name"] == "BRIGADE_JOB"
    env = [token, key]
    assert [each["name"] for each in env] == ["HF_TOKEN", "WANDB_API_KEY"]
    assert {each["name"]: each["value"] for each in caches} == {
        "HF_HOME": "/cache/huggingface", "BRIGADE_CACHE": "/cache/brigade"
    }  # fmt: skip
    assert all(
        each["valueFrom"]["secretKeyRef"] == {"name": "brigade", "key": each["name"], "optional": True} for each in env
    )


def test_kubernetes_expands_nothing_in_flags_and_reads_words_as_words():
    made = job("recipes/tiny/full.yaml", "--learning_rate", "1e-5", "--model_name_or_path", "$(HOME)/$x")
    manifest = text("kubernetes", made)
    assert "$$(HOME)/$$x" in yaml.safe_load(manifest)["spec"]["trainer"]["command"]
    assert '"1e-5"' in manifest, "Kubernetes' YAML takes a bare 1e-5 for a number, and refuses it in a command"


# ---- SkyPilot ----------------------------------------------------------------------------------------------------
def parse(home, *paths):
    """How SkyPilot's own parser ends with these tasks."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command = [str(SKY), "tests/jobs/parse_sky.py", *paths]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def parsed(tmp_path_factory):
    """What SkyPilot makes of every task, by recipe, hostfile and flags; one process parses them all."""
    if not SKY.exists():
        pytest.fail("SkyPilot's environment is missing: run `make skypilot` once (or `make test-all`)")
    directory = tmp_path_factory.mktemp("sky")
    cases = [(recipe, hostfile, ANY_MICRO_BATCH) for recipe, hostfile in PAIRS]
    cases += [("recipes/tiny/full.yaml", "hostfiles/2x8", ("--gpu", gpu, "--report_to=wandb")) for gpu in ACCELERATORS]
    paths = {}
    for number, case in enumerate(cases):
        path = directory / f"{number}.yaml"
        with contextlib.chdir(ROOT):
            path.write_text(text("skypilot", job(case[0], *case[2], hostfile=case[1])))
        paths[case] = str(path)
    done = parse(directory, *paths.values())
    assert done.returncode == 0, done.stderr[-3000:]
    tasks = json.loads(done.stdout)
    return {case: tasks[path] for case, path in paths.items()}


@pytest.mark.slow
def test_skypilot_reads_every_task_as_meant(parsed):
    for (recipe, hostfile, flags), task in parsed.items():
        made = job(recipe, *flags, hostfile=hostfile)
        gpu = made.settings.recipe.cluster.gpu
        assert task["num_nodes"] == len(made.hosts) and sorted(task["storage"]) == ["/cache", "/data", "/outputs"]
        assert task["accelerators"] == ({ACCELERATORS[gpu]: 8} if gpu else None)
        assert task["cpus"] == (None if gpu else "8+")
        assert task["use_spot"] is True and task["job_recovery"]["max_restarts_on_errors"] == 0
        assert task["envs"] == {"OUTPUT": f"/outputs/{made.output_dir.name}", "HF_HOME": "/cache/huggingface"}
        assert task["secrets"] == ["HF_TOKEN"] * (not recipe.startswith(OF_THE_HOST)) + ["WANDB_API_KEY"] * (
            "--report_to=wandb" in flags
        )
        assert task["run"] == document(made)["run"] and "make setup" in task["setup"]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["nane: x", "resources: {acelerators: H100}"])
def test_skypilot_refuses_what_it_does_not_know(change, parsed, tmp_path):
    task = document(job())
    ((key, value),) = yaml.safe_load(change).items()
    task[key] = task["resources"] | value if key == "resources" else value
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump(task))
    assert parse(tmp_path, path).returncode != 0


@pytest.mark.parametrize("recipe, ranks", [("recipes/tiny/full.yaml", "8"), ("recipes/qwen3-8b/full.yaml", "4")])
def test_each_node_starts_its_own_ranks(recipe, ranks, tmp_path):
    """The run script on two nodes, with a fake python; the second GPU count is the cloud's word, not the hostfile's."""
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\nprintf \'%s\\n\' "$@" > "words-$SKYPILOT_NODE_RANK"\n')
    python.chmod(0o755)
    task = document(job(recipe, "--model_name_or_path", "it's a $model"))
    (tmp_path / "run.sh").write_text("#!/bin/bash\n" + task["run"])
    (tmp_path / "setup.sh").write_text("#!/bin/bash\n" + task["setup"])
    shellcheck("--severity", "warning", tmp_path / "run.sh", tmp_path / "setup.sh")
    (tmp_path / "out").mkdir()
    codes = []
    for _ in ("without the success marker", "with it"):
        for rank in ("0", "1"):
            environment = {
                "PATH": os.environ["PATH"],
                "OUTPUT": str(tmp_path / "out"),
                "SKYPILOT_NUM_NODES": "2",
                "SKYPILOT_NODE_RANK": rank,
                "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8",
                "SKYPILOT_NUM_GPUS_PER_NODE": "4",
            }
            codes.append(subprocess.run(["bash", "run.sh"], cwd=tmp_path, env=environment, timeout=30).returncode)
        (tmp_path / "out/success.json").touch()
    assert codes == [1, 0, 0, 0], "the head ends well only with the success marker"
    for rank in (0, 1):
        read = get_args_parser().parse_args((tmp_path / f"words-{rank}").read_text().splitlines()[2:])
        assert (read.nnodes, read.nproc_per_node, read.node_rank) == ("2", ranks, rank)
        assert (read.master_addr, read.master_port) == ("10.0.0.7", 29500)
        assert read.training_script_args[:4] == ["--recipe", recipe, "--model_name_or_path", "it's a $model"]


def test_an_unknown_gpu_is_told_the_known_ones(mistake):
    message = mistake(document, job("recipes/tiny/full.yaml", "--gpu", "H1000"))
    assert "flag --gpu" in message and "'H1000'" in message and "H100 80GB" in message
    for spelling in ("NVIDIA H100 80GB", "h100 80gb", "NVIDIA GeForce RTX 4090"):
        resources = document(job("recipes/tiny/full.yaml", "--gpu", spelling))["resources"]
        assert resources["accelerators"] in ("H100:8", "RTX4090:8")

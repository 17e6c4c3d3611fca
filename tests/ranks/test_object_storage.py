"""A run whose output is on an S3 server: a cut in mid-upload loses nothing, and an empty host goes on from what is there."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from testing import marks, runs
from testing.command_line import as_flags
from testing.parity import STRATEGIES
from testing.ranks import run_ranks
from testing.run_files import losses_of
from testing.s3_server import BUCKET, objects, s3_server

HEAD = "brigade.json"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("server")) as system:
        yield system


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return [*runs.write_saving_inputs(tmp_path_factory.mktemp("inputs")), "--report_page", "false"]


def train(monkeypatch, host, when, flags, code=0):
    """Run train.py on two ranks of a host whose local outputs lie in `host`."""
    monkeypatch.setenv("BRIGADE_LOCAL_OUTPUT", str(host))
    ended = run_ranks("testing.interrupting", when, *flags, ranks=2, timeout=300)
    assert (ended.returncode == 0) == (code == 0), ended.stderr[-3000:]
    return ended


def whole(system, folder):
    """The steps of the checkpoints there that have a manifest and every file that it names, with its size."""
    there = objects(system, folder)
    found = []
    for name in there:
        if name.endswith(HEAD):
            place = name.removesuffix(HEAD)
            record = json.loads(system.open_input_stream(f"{BUCKET}/{folder}/{name}").read())
            assert all(there.get(place + file) == entry["bytes"] for file, entry in record["files"].items())
            found.append(int(place.strip("/").rpartition("-")[2]))
    return sorted(found)


@pytest.mark.parametrize("strategy", marks.cases(slow=["ddp", "zero3"], matrix=["fsdp2"]))
def test_a_cut_upload_is_not_taken_for_whole_and_an_empty_host_goes_on(strategy, flags, server, tmp_path, monkeypatch):
    undisturbed = tmp_path / "undisturbed"
    flags = [*flags, *STRATEGIES[strategy]]
    train(monkeypatch, tmp_path, "never", [*flags, "--output_dir", str(undisturbed)])

    url, folder = f"s3://{BUCKET}/{strategy}/one", f"{strategy}/one"
    flags += ["--output_dir", url]
    first, second = tmp_path / "first host", tmp_path / "second host"
    train(monkeypatch, first, "uploading", flags, code=1)
    there = objects(server, folder)
    assert any(name.startswith("checkpoint-4/") for name in there) and f"checkpoint-4/{HEAD}" not in there
    assert whole(server, folder) == [2] and "run.yaml" in there and "success.json" not in there

    again = train(monkeypatch, second, "never", flags)
    here = second / "s3" / BUCKET / folder
    assert "Downloading checkpoint-2" in again.stdout and f"Uploaded to {url}" in again.stdout
    assert losses_of(here) == pytest.approx(losses_of(undisturbed), rel=1e-5)
    assert whole(server, folder) == [4, 6]  # and save_total_limit has removed the second
    there = objects(server, folder)
    checkpoints = {name.partition("/")[0] for name in there if name.startswith("checkpoint-")}
    assert checkpoints == {"checkpoint-4", "checkpoint-6"}
    for name in ("model.safetensors", "run.yaml", "events.jsonl", "trainer_state.json", "success.json"):
        assert there[name] == (here / name).stat().st_size or name == "events.jsonl"
    assert not [name for name in there if ".probe" in name or name.startswith(".")]

    shutil.rmtree(second)
    finished = train(monkeypatch, second, "never", flags)
    assert "This run is finished" in finished.stdout
    other = train(monkeypatch, second, "never", [*flags, "--learning_rate", "1e-3"], code=2)
    assert "it holds another run" in other.stderr and "Traceback" not in other.stderr
    fresh = train(monkeypatch, second, "never", [*flags, "--fresh"], code=2)
    assert "objects cannot be moved aside" in fresh.stderr and objects(server, folder) == there


@pytest.mark.slow
def test_bad_storage_is_found_before_training(flags, server, tmp_path, monkeypatch):
    missing = train(monkeypatch, tmp_path, "never", [*flags, "--output_dir", "s3://nobody/one"], code=2)
    assert "there is no bucket 'nobody'" in missing.stderr and "step 1" not in missing.stdout
    stream = server.open_output_stream(f"{BUCKET}/notes/todo.txt")
    stream.write(b"not a run's")
    stream.close()
    occupied = train(monkeypatch, tmp_path, "never", [*flags, "--output_dir", f"s3://{BUCKET}/notes"], code=2)
    assert "it is not a run's" in occupied.stderr
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    away = train(monkeypatch, tmp_path, "never", [*flags, "--output_dir", f"s3://{BUCKET}/two"], code=2)
    assert "cannot be reached at http://127.0.0.1:9" in away.stderr
    for ended in (missing, occupied, away):
        assert "Traceback" not in ended.stderr and "nothing-secret" not in ended.stderr + ended.stdout


@pytest.mark.slow
def test_data_lies_there_too(flags, server, tmp_path, monkeypatch):
    """It is the same data: the run in a local directory has the same fingerprint."""
    names = {"train_file": "", "validation_file": ""}
    recipe = yaml.safe_load(Path(flags[1]).read_text())["data"]
    for key in names:
        content = Path(recipe[key]).read_bytes()
        name = f"{BUCKET}/data/{key}.jsonl"
        with server.open_output_stream(name) as stream:
            stream.write(content)
        names[key] = f"s3://{name}"
    monkeypatch.setenv("BRIGADE_CACHE", str(tmp_path / "cache"))
    data = as_flags(**names | {"train_file": names["train_file"].replace("train_file", "train_*")})
    few = ["--max_steps", "2", "--eval_steps", "2"]
    train(monkeypatch, tmp_path, "never", [*flags, *few, "--output_dir", str(tmp_path / "local")])
    train(monkeypatch, tmp_path, "never", [*flags, *few, *data, "--output_dir", str(tmp_path / "remote")])
    prints = [yaml.safe_load((tmp_path / name / "run.yaml").read_text())["run"]["data"] for name in ("local", "remote")]
    assert prints[0] == prints[1] and losses_of(tmp_path / "local") == losses_of(tmp_path / "remote")

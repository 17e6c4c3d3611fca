"""Uploads, downloads and their rules, on fsspec's storage in memory; what a user is told where storage refuses."""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import fsspec
import pytest

from brigade.errors import UserError
from brigade.train.checkpoint import manifest, remote, uploads
from brigade.train.checkpoint.uploads import Uploads
from brigade.train.data.data_files import paths_of
from brigade.train.host import checksums, storage
from brigade.train.host.cluster import World
from brigade.train.recipe import flags
from brigade.train.run import on_disk

URL = "memory://bucket/runs/one"


@pytest.fixture(autouse=True)
def memory(monkeypatch, own_cache, tmp_path):
    monkeypatch.setattr(uploads, "PAUSES", (0.0, 0.0))
    monkeypatch.setenv("BRIGADE_LOCAL_OUTPUT", str(tmp_path / "outputs"))
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def checkpoint(directory, step, content="weights", best=None):
    """A whole checkpoint of a few files, as Saving leaves it."""
    folder = directory / f"checkpoint-{step}"
    (folder / "global_step" / "empty").mkdir(parents=True)
    (folder / "model.safetensors").write_text(f"{content} of {step}")
    (folder / "global_step" / "states.pt").write_text("states")
    state = {"best_model_checkpoint": best and f"/elsewhere/checkpoint-{best}"}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "checksum": checksums.of_file(path)}
        for path in folder.rglob("*")
        if path.is_file()
    }
    manifest.write(folder, {"step": step}, files, ["global_step/empty"])
    return folder


@pytest.fixture
def directory(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.yaml").write_text("run: {identity: abc}\n")
    return folder


@pytest.fixture
def up(directory):
    """Uploads of which the newest three stay."""
    return Uploads(storage.open_storage(URL, ""), directory, 3)


def there():
    return storage.open_storage(URL, "").sizes()


def names_there():
    """The names of checkpoints' folders in the storage, whole or not."""
    return sorted({name.partition("/")[0] for name in there() if name.startswith("checkpoint")})


def upload(up, folder):
    up.add(folder)
    up.wait()


def put(memory, folder, name):
    for path in folder.rglob("*"):
        if path.is_file():
            memory.pipe(f"{URL}/{name}/{path.relative_to(folder)}", path.read_bytes())


def whole():
    return sorted(each.step for each in checkpoints() if each.whole)


def checkpoints():
    return uploads.checkpoints_there(there(), storage.open_storage(URL, "").read)


def test_a_checkpoint_comes_back_as_it_was_uploaded(directory, tmp_path, memory, up):
    folder = checkpoint(directory, 4)
    upload(up, folder)
    (found,) = checkpoints()
    (tmp_path / "other").mkdir()
    brought = remote._download(storage.open_storage(URL, ""), found, tmp_path / "other")
    assert manifest.flaw(brought) is None and manifest.damage(brought) is None
    assert (brought / "global_step/empty").is_dir()
    assert {path.name for path in brought.rglob("*")} == {path.name for path in folder.rglob("*")}


def test_a_changed_byte_in_the_storage_is_found(directory, tmp_path, memory, capsys, up):
    upload(up, checkpoint(directory, 4))
    memory.pipe(f"{URL}/checkpoint-4/global_step/states.pt", b"stales")
    (found,) = checkpoints()
    (tmp_path / "other").mkdir()
    assert remote._download(storage.open_storage(URL, ""), found, tmp_path / "other") is None
    assert "checkpoint-4 is left out" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil"])
def test_a_manifest_names_no_file_elsewhere(name, directory, memory):
    folder = checkpoint(directory, 4)
    record = json.loads((folder / "brigade.json").read_text())
    manifest.write(folder, {"step": 4}, record["files"] | {name: {"bytes": 1, "checksum": "0"}})
    put(memory, folder, "checkpoint-4")
    assert whole() == []


def put_there(memory, tmp_path, folders):
    """Put checkpoints into the storage, {name of the folder: step of its manifest}; None: a manifest that nobody can read."""
    for name, step in folders.items():
        folder = checkpoint(tmp_path / "made" / name, step or 0)
        if step is None:
            (folder / "brigade.json").write_text("{")
        put(memory, folder, name)


@pytest.mark.parametrize(
    ("limit", "best", "folders", "left"),
    [
        (2, None, {"checkpoint-4": 4, "checkpoint-6": 6, "checkpoint-1012": 4}, ["checkpoint-6", "checkpoint-8"]),
        (2, None, {"checkpoint-2": 7, "checkpoint-6": 6}, ["checkpoint-2", "checkpoint-8"]),
        (1, None, {"checkpoint-3": 20, "checkpoint-6": 6}, ["checkpoint-3", "checkpoint-8"]),
        (2, 4, {"checkpoint-7": 4, "checkpoint-6": 6}, ["checkpoint-7", "checkpoint-8"]),
        (3, None, {"checkpoint-6": 6, "checkpoint-7": 6, "checkpoint-2": 2}, ["checkpoint-2", "checkpoint-6", "checkpoint-8"]),
        (2, None, {"checkpoint-1012": 8, "checkpoint-6": 6}, ["checkpoint-1012", "checkpoint-6", "checkpoint-8"]),
        (2, None, {"checkpoint-1012": None, "checkpoint-6": 6}, ["checkpoint-1012", "checkpoint-6", "checkpoint-8"]),
        (2, None, {"checkpoint-7": None, "checkpoint-6": 6}, ["checkpoint-6", "checkpoint-8"]),
        (None, None, {"checkpoint-4": 4, "checkpoint-9": 4}, ["checkpoint-4", "checkpoint-8", "checkpoint-9"]),
    ],
    ids=["copy", "newer by a lower name", "ahead", "best", "copy with room", "copy of it", "odd", "odd and old", "no limit"],
)  # fmt: skip
def test_checkpoints_in_the_storage_are_rotated_by_the_steps_of_their_manifests(
    limit, best, folders, left, directory, tmp_path, memory
):
    put_there(memory, tmp_path, folders)
    up = Uploads(storage.open_storage(URL, ""), directory, limit)
    upload(up, checkpoint(directory, 8, best=best))
    assert up.late is None
    assert names_there() == left


@pytest.mark.parametrize(
    ("here", "folders", "brought"),
    [
        ({}, {"checkpoint-4": 4, "checkpoint-1012": 4}, {"checkpoint-4": 4}),
        ({}, {"checkpoint-4": 12, "checkpoint-6": 6}, {"checkpoint-12": 12}),
        ({}, {"checkpoint-12": 4}, {"checkpoint-4": 4}),
        ({}, {"checkpoint-12": 4, "checkpoint-10": 10}, {"checkpoint-10": 10}),
        ({}, {"checkpoint-12": None, "checkpoint-4": 4}, {"checkpoint-4": 4}),
        ({"checkpoint-6": 6}, {"checkpoint-12": 4, "checkpoint-6": 6}, {"checkpoint-6": 6}),
        ({"checkpoint-12": 4}, {"checkpoint-12": 12}, {"checkpoint-4": 4, "checkpoint-12": 12}),
        ({"checkpoint-12": 4, "checkpoint-4": 4}, {"checkpoint-12": 12}, {"checkpoint-4": 4, "checkpoint-12": 12}),
    ],
    ids=["copy", "lower name", "renamed", "renamed and newer", "odd", "nothing newer", "in its place", "copy in its place"],
)  # fmt: skip
def test_a_host_goes_on_from_the_newest_step_of_the_storage_not_from_the_highest_name(
    here, folders, brought, directory, tmp_path, memory
):
    put_there(memory, tmp_path, folders)
    for name, step in here.items():
        checkpoint(tmp_path / "here" / name, step).rename(directory / name)
    settings = SimpleNamespace(remote=URL, fresh=False, resume_from_checkpoint=None)
    world = World(0, 0, 1, 1, "here", "python")
    remote.bring_checkpoint(SimpleNamespace(settings=settings, directory=directory, world=world))
    assert {path.name: on_disk.step_of(path) for path in on_disk.checkpoints(directory)} == brought
    assert all(manifest.flaw(path) is None for path in on_disk.checkpoints(directory))


def test_a_renamed_checkpoint_is_uploaded_under_its_step(directory):
    up = Uploads(storage.open_storage(URL, ""), directory, 2)
    checkpoint(directory, 2).rename(directory / "checkpoint-9")
    checkpoint(directory, 4, best=2).rename(directory / "checkpoint-2")
    up.add_newest()
    up.wait()
    assert {name.partition("/")[0] for name in there()} == {"checkpoint-2", "checkpoint-4", "run.yaml", "events.jsonl"}
    assert storage.open_storage(URL, "").read("checkpoint-4/model.safetensors") == b"weights of 4"


def test_a_newer_one_takes_the_place_of_one_that_waits(directory, monkeypatch):
    go, begun = threading.Event(), threading.Event()
    up = Uploads(storage.open_storage(URL, ""), directory, None)
    put = up.storage.put

    def slow(contents):
        begun.set()
        assert go.wait(20)
        put(contents)

    monkeypatch.setattr(up.storage, "put", slow)
    folders = [checkpoint(directory, step) for step in (2, 4, 6)]
    up.add(folders[0])
    assert begun.wait(20)
    up.add(folders[1])
    up.add(folders[2])
    assert [up.holds(folder) for folder in folders] == [True, False, True]
    go.set()
    up.wait()
    assert whole() == [2, 6] and not up.holds(folders[2])


def test_the_best_is_uploaded_though_a_newer_one_took_its_place(directory):
    up = Uploads(storage.open_storage(URL, ""), directory, 2)
    checkpoint(directory, 2)
    upload(up, checkpoint(directory, 4, best=2))
    assert whole() == [2, 4]


def test_what_was_cut_is_none_and_goes_with_the_next(directory, memory, capsys, monkeypatch, up):
    put, failing = up.storage.put, True

    def cut(contents):
        if failing and any("trainer_state.json" in name for _, name in contents):
            raise OSError("the network is away")
        put(contents)

    monkeypatch.setattr(up.storage, "put", cut)
    upload(up, checkpoint(directory, 2))
    assert whole() == [] and there() and up.late[0].name == "checkpoint-2"
    assert "checkpoint-2 could not be uploaded: " in capsys.readouterr().err
    failing = False
    upload(up, checkpoint(directory, 4))
    assert whole() == [4] and up.late is None
    assert not [name for name in there() if name.startswith("checkpoint-2/")]


def test_one_of_the_same_step_replaces_it_and_is_never_half(directory, monkeypatch, up):
    folder = checkpoint(directory, 2)
    upload(up, folder)
    shutil.rmtree(folder)
    seen = []
    put = up.storage.put
    monkeypatch.setattr(up.storage, "put", lambda contents: (seen.append(whole()), put(contents)))
    upload(up, checkpoint(directory, 2, content="others"))
    assert seen[0] == [] and whole() == [2]
    assert storage.open_storage(URL, "").read("checkpoint-2/model.safetensors") == b"others of 2"


def test_the_end_uploads_the_rest_with_its_marker_last(directory, monkeypatch, up):
    for name in ("model.safetensors", "success.json", ".owner", "stop"):
        (directory / name).write_text(name)
    (directory / "link.json").symlink_to("/etc/passwd")
    (directory / "heartbeats").mkdir()
    (directory / "heartbeats" / "rank-0.json").write_text("{}")
    order, put = [], up.storage.put
    monkeypatch.setattr(up.storage, "put", lambda contents: (order.extend(name for _, name in contents), put(contents)))
    up.finish()
    assert sorted(there()) == ["model.safetensors", "run.yaml", "success.json"] and order[-1] == "success.json"


def test_a_run_says_at_its_end_what_is_not_there(directory, monkeypatch, up):

    def away(contents):
        raise OSError("AWS Error NETWORK_CONNECTION: curlCode: 7")

    monkeypatch.setattr(up.storage, "put", away)
    with pytest.raises(UserError, match="the same command uploads the rest") as raised:
        up.finish()
    assert raised.value.code == 1 and str(directory) in raised.value.cure
    assert "(tried 3 times within 0 s)" in raised.value.problem


@pytest.mark.slow  # a server, and a process of PyArrow's
def test_what_s3_refuses_is_told_in_our_words_alone():
    """A line of C++ stood beside it: `interfaces.cc:323: Error ignored when destroying file of type N5arrow2fs...`."""

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_PUT(self):
            body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            self.rfile.read(int(self.headers["content-length"] or 0))
            self.send_response(403)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PUT

        def log_message(self, *_):
            pass

    code = (
        "from brigade.train.host import storage\n"
        "folder = storage.open_storage('s3://bucket/run', 'flag --output_dir')\n"
        "try: folder.put([(b'0' * 25_000_000, 'model.safetensors')])\n"
        "except Exception as error: print(storage.explained(error, folder.url))"
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        env = os.environ | keys | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100)
        server.shutdown()
    assert "these credentials may not do that: CreateMultipartUpload: ACCESS_DENIED" in done.stdout, done
    assert done.stderr == "" and "When " not in done.stdout


# ---- names and errors --------------------------------------------------------------------------------------------
def test_where_it_lies_locally(tmp_path):
    settings = flags.load(["--output_dir", "s3://bucket/team/one/"])
    assert settings.remote == "s3://bucket/team/one"
    assert settings.directory("ddp") == tmp_path / "outputs/s3/bucket/team/one"
    assert flags.load(["--output_dir", "runs/one"]).remote == ""


@pytest.mark.parametrize("words, problem", [
    (["--output_dir", "s3://key:secret@bucket/one"], "holds credentials"),
    (["--output_dir", "s3://bucket/../one"], "has a part"),
    (["--output_dir", "s3://"], "names no bucket"),
    (["--output_dir", "s3://bucket/one", "--sync_every", "5"], "replicas"),
    (["--resume_from_checkpoint", "s3://bucket/one/checkpoint-4"], "is read from a disk"),
])  # fmt: skip
def test_urls_that_are_refused(words, problem, mistake):
    message = mistake(flags.load, words)
    assert problem in message
    assert "secret" not in message


@pytest.mark.parametrize("scheme, package", [("abfs", "adlfs"), ("abfss", "adlfs"), ("nonesuch", "take s3://")])
def test_a_scheme_without_its_package_names_it(scheme, package, mistake):
    assert package in mistake(storage.open_storage, f"{scheme}://bucket/one", "flag --output_dir")


@pytest.mark.parametrize("url, words, said", [
    ("s3://b/one", "AWS Error NO_SUCH_BUCKET during PutObject operation", "there is no bucket 'b'"),
    ("s3://b/one", "AWS Error ACCESS_DENIED during PutObject operation", "no credentials"),
    ("s3://b/one", "AWS Error INVALID_ACCESS_KEY_ID during PutObject", "are not known there"),
    ("s3://b/one", "AWS Error NETWORK_CONNECTION curlCode: 6", "cannot be reached"),
    ("s3://b/one", "When reading key 'one/a' in bucket 'b': AWS Error UNKNOWN (HTTP status 500) during HeadObject operation: ",
     "s3://b/one: HeadObject: UNKNOWN (HTTP status 500)\n"),
    ("gs://b/one", "Could not create a OAuth2 access token", "GOOGLE_APPLICATION_CREDENTIALS"),
    ("gs://b/one", "google::cloud::Status(PERMISSION_DENIED: no)", "may not do that"),
    ("s3://b/one", "something else\nin two lines", "something else"),
])  # fmt: skip
def test_errors_are_told_in_a_users_terms(url, words, said, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    assert said in str(storage.explained(OSError(words), url, "flag --output_dir"))


# ---- data --------------------------------------------------------------------------------------------------------
def test_data_is_downloaded_once_for_each_version(memory, monkeypatch, mistake):
    for name in ("a-1.jsonl", "a-2.jsonl", "b.jsonl", "deeper/a-3.jsonl"):
        memory.pipe(f"memory://bucket/data/{name}", name.encode())
    found = paths_of("memory://bucket/data/a-*.jsonl", "x")
    assert [(path.name, path.read_text()) for path in found] == [(f"a-{n}.jsonl", f"a-{n}.jsonl") for n in (1, 2)]
    assert [path.name for path in paths_of("memory://bucket/data/**/*.jsonl", "x")][-1] == "a-3.jsonl"
    monkeypatch.setattr(storage._Fsspec, "get", None)  # nothing is downloaded again
    assert paths_of("memory://bucket/data/a-*.jsonl", "x") == found
    monkeypatch.undo()
    assert "there is no object" in mistake(paths_of, "memory://bucket/data/c.jsonl", "data.train_file")


# ---- the Hub -----------------------------------------------------------------------------------------------------
def test_what_goes_to_the_hub_together_is_one_commit(directory, monkeypatch):
    import huggingface_hub
    from huggingface_hub.hf_file_system import HfFileSystemResolvedRepositoryPath

    commits = []
    place = HfFileSystemResolvedRepositoryPath("model", "me/runs", "main", "one")
    monkeypatch.setattr(huggingface_hub.HfFileSystem, "resolve_path", lambda *_: place)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "create_commit", lambda self, *about, **options: commits.append((about, options))
    )
    up = Uploads(storage.open_storage("hf://me/runs/one", ""), directory, None)
    up._put([(directory / "run.yaml", "run.yaml"), (b"{}", "events.jsonl")])
    ((name, operations), options), = commits  # fmt: skip
    assert name == "me/runs" and [each.path_in_repo for each in operations] == ["one/run.yaml", "one/events.jsonl"]
    assert options["repo_type"] == "model" and options["revision"] == "main"

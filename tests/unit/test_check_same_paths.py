"""What check says of hosts whose variables or paths differ, and what its probe reads."""

import os
import subprocess
import sys
import types

import pytest

from brigade.check import packages, sameness
from brigade.check.probes import sameness as probe
from brigade.hosts.job import make
from brigade.train.recipe.files import REPOSITORY
from testing.same_hosts import LOOK, PINS, odd, variables


# ---- variables ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("own, level, says", [
    (variables(NCCL_ALGO={"is": "Tree"}), "red", "NCCL_ALGO is 'Tree'; elsewhere 'Ring'"),
    ({"variables": {"HF_TOKEN": {"hash": "1234"}}}, "red", "NCCL_ALGO is not set; elsewhere it is 'Ring'"),
    (variables(NCCL_P2P_DISABLE={"is": "1"}), "red", "NCCL_P2P_DISABLE is '1'"),
    (variables(NCCL_NET_GDR_LEVEL={"is": "SYS"}), "yellow", "NCCL_NET_GDR_LEVEL is 'SYS'"),
    (variables(OMP_NUM_THREADS={"is": "1"}), "yellow", "OMP_NUM_THREADS is '1'; elsewhere it is not set"),
    (variables(HF_TOKEN={"hash": "9999"}), "yellow", "HF_TOKEN has another value than elsewhere"),
    ({"variables": {"NCCL_ALGO": {"is": "Ring"}}}, "yellow", "HF_TOKEN is not set; elsewhere it is"),
    (variables(https_proxy={"hash": "77"}), "yellow", "https_proxy is set; elsewhere it is not"),
])  # fmt: skip
def test_a_variable_that_differs(own, level, says):
    result = odd("variables", own)
    assert result.level == level
    assert says in result.problem
    assert "1234" not in str(result)
    assert "9999" not in str(result)


def test_secrets_leave_no_host(monkeypatch):
    secret, salt = sameness.VARIABLES["secret"], "salt"
    for name, value in {
        "HF_TOKEN": "hf_secret",
        "WANDB_API_KEY": "abc",
        "HTTPS_PROXY": "http://me:word@proxy:3128",
        "MY_PASSWORD": "x",
        "https_proxy": "user:pw@proxy:3128",
        "HF_ENDPOINT": "https://ghp_xxx@host",
        "ALL_PROXY": "http://me:pass/word@proxy:3128",
    }.items():
        assert set(probe._value(name, value, secret, salt)) == {"hash"}, name
        assert probe._value(name, value, secret, salt) != probe._value(name, value, secret, "other")
    for name, value in {"TOKENIZERS_PARALLELISM": "true", "https_proxy": "http://proxy:3128",
                        "LD_LIBRARY_PATH": "/opt/gcc@12/lib"}.items():  # fmt: skip
        assert probe._value(name, value, secret, salt) == {"is": value}


def test_every_variable_that_matters_is_compared_and_a_hosts_own_is_not(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("NCCL_", "GLOO_", "HF_", "OMP_")):
            monkeypatch.delenv(name)
    wanted = ["NCCL_ALGO", "GLOO_DEVICE_TRANSPORT", "OMP_NUM_THREADS", "HF_HOME", "no_proxy", "LD_LIBRARY_PATH"]
    own = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_GID_INDEX", "NCCL_HOSTID", "NCCL_CONF_FILE", "EDITOR"}
    for name in [*wanted, *own]:
        monkeypatch.setenv(name, "x")
    compared = [*sameness.VARIABLES["red"], *sameness.VARIABLES["yellow"]]
    found = probe.look([], compared, sameness.VARIABLES["own"], sameness.VARIABLES["secret"], "", {}, [])["variables"]
    assert set(wanted) <= set(found)
    assert not own & set(found)


# ---- paths -------------------------------------------------------------------------------------------------------
def job(*words):
    return make("recipes/tiny/full.yaml", list(words), None, {"node1": 2})


def test_what_is_missing_is_red_and_what_leads_elsewhere_a_warning():
    gone = {"paths": LOOK["paths"] | {"code": {"there": False, "real": "/code"}}}
    assert (odd("paths", gone).level, odd("paths", gone).value) == ("red", "no code")
    elsewhere = {"paths": LOOK["paths"] | {"environment": {"there": True, "real": "/scratch/env"}}}
    result = odd("paths", elsewhere)
    assert result.level == "yellow"
    assert "leads to /scratch/env, elsewhere /opt/env" in result.problem


def test_a_recipe_adds_its_data_its_output_and_itself(tmp_path):
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats/a.jsonl").write_text("")
    words = ["--train_file", f"{tmp_path}/chats/*.jsonl", "--output_dir", str(tmp_path / "run")]
    found = sameness.paths_of(job(*words))
    assert found["output"] == str(tmp_path / "run")
    assert found[f"data {tmp_path}/chats/*.jsonl"] == str(tmp_path / "chats")
    assert {"code", "environment", "recipe"} <= set(found)


def test_data_in_object_storage_is_at_no_path():
    """It was looked for below the clone, and launch refused every host, which lacked it."""
    found = sameness.paths_of(job("--train_file", "s3://bucket/rows-*.jsonl"))
    assert not [what for what in found if what.startswith("data")]


def test_all_that_a_run_reads_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words").mkdir()
    (tmp_path / "mine.py").write_text("def loss(): ...\n")
    words = {"tokenizer_name_or_path": "words", "chat_template": "mine.jinja", "token_loss": "mine.py:loss"}
    own = job(*(f"--{key}={word}" for key, word in words.items()))
    found = sameness.paths_of(own)
    assert found["tokenizer"] == f"{tmp_path}/words"
    # One that is nowhere is looked for in the clone, as ranks do.
    assert set(sameness.own_files(own)) >= {f"{tmp_path}/mine.py", f"{REPOSITORY}/mine.jinja"}


def test_paths_are_those_that_the_ranks_find(tmp_path, monkeypatch):
    """A ~ is each rank's own; what is named from here is named from there in full, for probes start elsewhere."""
    (tmp_path / "mine.jsonl").write_text("")
    (tmp_path / "zero.json").write_text((REPOSITORY / "ds_configs/zero2.json").read_text())
    monkeypatch.chdir(tmp_path)
    named = {"mine.jsonl": f"{tmp_path}/mine.jsonl", "*.jsonl": str(tmp_path), "~/data/a.jsonl": "~/data/a.jsonl"}
    for name, path in named.items():
        own = job("--train_file", name, "--ds_config", "zero.json", "--model_name_or_path", "~/model")
        found = sameness.paths_of(own)
        assert found[f"data {name}"] == path
        assert found["model"] == "~/model"
        assert sameness.own_files(own) == [str(REPOSITORY / "recipes/tiny/full.yaml"), f"{tmp_path}/zero.json"]


def test_a_home_is_this_hosts(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("x")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = probe.look([], [], [], "x", "", {"data": "~/a"}, ["~/a", "~/none"])
    assert found["paths"]["data"] == {"there": True, "real": str(tmp_path / "a")}
    assert found["own"]["~/a"]
    assert found["own"]["~/none"] is None


# ---- the probe ---------------------------------------------------------------------------------------------------
def test_this_clone_is_read_without_torch():
    program = "import sys\nfrom brigade.check.probes import sameness\n"
    program += "found = sameness.look(['torch'], [], [], 'x', '', {'code': '.'}, [])\n"
    program += "print(found['packages']['torch'], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    version, imported = done.stdout.split()
    assert packages.meets(version, PINS["torch"])
    assert imported == "False"


def test_changed_files_are_named_whatever_happened_to_them(tmp_path, monkeypatch):
    def git(*words):
        who = ["-c", "user.name=me", "-c", "user.email=me@localhost"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(probe, "PROJECT", tmp_path)
    assert probe._git() is None
    git("init")
    for name in ("kept", "a file", "gone", "old name"):
        (tmp_path / name).write_text(f"{name}\n" * 9)
    git("add", ".")
    git("commit", "-m", "first")
    assert probe._git()["changed"] == []
    (tmp_path / "a file").write_text("changed")
    (tmp_path / "gone").unlink()
    git("mv", "old name", "new name")
    (tmp_path / "untracked").write_text("")
    found = probe._git()
    assert sorted(found["changed"]) == ["a file", "gone", "new name"]
    assert len(found["commit"]) == 40


def test_torchs_version_file_is_read(tmp_path, monkeypatch):
    (tmp_path / "version.py").write_text(
        "from typing import Optional\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
    )
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(probe.importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setattr(probe, "installed", {"nvidia-nccl-cu12": "2.27.3"}.get)
    assert probe._torch() == {"cuda": "12.8", "cudnn": None, "nccl": "2.27.3"}
    (tmp_path / "version.py").write_text("cuda = None\n")
    assert probe._torch() == {"cuda": None}

"""What check says of hosts that differ: versions, code, variables, paths."""

import asyncio
import os
import subprocess
import sys
import types

import pytest

from brigade.check import clone, pins, sameness
from brigade.check.hosts import Recorded, Wanted
from brigade.check.probes import sameness as probe
from brigade.check.registry import checks
from brigade.check.results import NotHere
from brigade.check.run import judge
from brigade.launch.job import make
from brigade.recipe.files import REPOSITORY

PINS = pins.pins()
LOOK = {
    "python": "CPython 3.11.7",
    "packages": {**PINS, "torch": f"{PINS['torch']}+cu128"},
    "torch": {"cuda": "12.8", "cudnn": "9.10.2.21", "nccl": "2.27.3"},
    "driver": "570.86.15",
    "kernel": "6.8.0-51-generic",
    "machine": "x86_64",
    "glibc": "2.39",
    "git": {"commit": "a" * 40, "changed": []},
    "variables": {"NCCL_ALGO": {"is": "Ring"}, "HF_TOKEN": {"hash": "1234"}},
    "own": {},
    "paths": {"code": {"there": True, "real": "/code"}, "environment": {"there": True, "real": "/opt/env"}},
}


def judged(name, *own, loaded=None, files=None, projects=None):
    """Results by host of one check. own: for node1, node2, ... what differs from LOOK"""
    looks = {f"node{number}": LOOK | one for number, one in enumerate(own, 1)}
    hello = {host: {"project": (projects or {}).get(host, "same")} for host in looks}
    answers = {"sameness.look": looks, "sameness.files": files or {}, "sameness.loaded": loaded or {}}
    hosts = Recorded(Wanted(dict.fromkeys(looks, 8)), answers, hello)
    check = next(check for check in checks() if check.name == name)
    found = {}
    for result in asyncio.run(judge(check, hosts)):
        found.setdefault(result.host, []).append(result)
    return found


def odd(name, own, **more):
    """The one result of the odd host of three; the others are sound."""
    found = judged(name, {}, own, {}, **more)
    assert [r.level for host in ("node1", "node3") for r in found[host]] == ["green", "green"], found
    (result,) = found["node2"]
    assert result.level == "green" or (result.why and result.cure)
    return result


def packages(**versions):
    return {"packages": LOOK["packages"] | versions}


@pytest.mark.parametrize("name", ["python", "packages", "CUDA libraries", "system", "code", "variables", "paths"])
def test_equal_hosts_are_sound(name):
    assert [r.level for found in judged(name, {}, {}).values() for r in found] == ["green", "green"]


# ---- versions ----------------------------------------------------------------------------------------------------
def test_another_python_is_red():
    result = odd("python", {"python": "CPython 3.12.1"})
    assert (result.level, result.problem) == ("red", "CPython 3.12.1, elsewhere CPython 3.11.7")


@pytest.mark.parametrize("package", ["torch", "deepspeed", "accelerate", "transformers", "datasets", "peft"])
def test_what_ranks_exchange_objects_with_is_red(package):
    result = odd("packages", packages(**{package: "0.0.1"}))
    assert (result.level, result.problem) == ("red", f"{package} 0.0.1, pinned {PINS[package]}")
    assert "pip install" in result.fix
    assert f"{package}==" in result.fix


def test_another_pinned_package_is_a_warning_and_is_installed_in_the_version_that_is_pinned():
    result = odd("packages", packages(tqdm="1.0", numpy=None))
    assert result.level == "yellow"
    assert result.problem == f"tqdm 1.0, pinned {PINS['tqdm']}; numpy is missing, pinned {PINS['numpy']}"
    assert result.fix.endswith(
        f"install --disable-pip-version-check --quiet tqdm=={PINS['tqdm']} numpy=={PINS['numpy']}"
    )
    assert sys.executable in result.fix


def test_of_a_build_the_version_is_installed_and_the_cure_says_so():
    result = odd("packages", packages(torch="2.0.0+cpu"))
    assert result.fix.endswith(f" torch=={PINS['torch']}")
    assert f"torch=={PINS['torch']}+cu128 from the index" in result.cure


def test_what_a_cell_does_not_show_is_kept_for_a_later_run():
    def details(name, own=None):
        return [r.detail for results in judged(name, {}, own or {}, {}).values() for r in results]

    assert f"tqdm {PINS['tqdm']}" in details("packages")[0]
    assert "tqdm 1.0" in details("packages", packages(tqdm="1.0"))[1]
    assert details("variables") == [("NCCL_ALGO=Ring", "HF_TOKEN is set")] * 3
    assert "NCCL_ALGO=Tree" in details("variables", variables(NCCL_ALGO={"is": "Tree"}))[1]
    assert details("paths")[0] == ("code: /code", "environment: /opt/env")
    assert details("code", {"git": LOOK["git"]}) == [()] * 3
    changed = judged("code", {"git": {"commit": "a" * 40, "changed": ["train.py"]}})
    assert changed["node1"][0].detail == ("train.py",)


def test_the_pin_is_the_reference_and_not_the_majority():
    found = judged("packages", packages(peft="0.1"), packages(peft="0.1"), {})
    assert {host: [r.level for r in results] for host, results in found.items()} == {
        "node1": ["red"],
        "node2": ["red"],
        "node3": ["green"],
    }


def test_builds_of_one_version_meet_the_pin_and_must_be_equal():
    result = odd("packages", packages(torch=f"{PINS['torch']}+cpu"))
    assert result.problem == f"torch {PINS['torch']}+cpu, elsewhere {PINS['torch']}+cu128"
    assert result.fix == ""  # PyPI has no such build, and of the version pip would say that it is there
    assert f"torch=={PINS['torch']}+cu128 from the index" in result.cure
    assert pins.meets("2.13.0+cpu", "2.13.0")
    assert not pins.meets("2.13.0", "2.13.0+cpu")
    assert not pins.meets("2.13.0.1", "2.13.0")


def test_all_hosts_with_the_same_other_version_are_warned():
    found = judged("packages", packages(transformers="5.0"), packages(transformers="5.0"))
    assert [r.level for results in found.values() for r in results] == ["yellow", "yellow"]


def test_what_all_hosts_lack_is_for_tests():
    found = judged("packages", packages(pytest=None), packages(pytest=None))
    assert [r.value for results in found.values() for r in results] == [
        f"torch {PINS['torch']}+cu128, {len(PINS)} pins, 1 not installed"
    ] * 2
    lacking = judged("packages", packages(torch=None), packages(torch=None))
    assert [r.level for results in lacking.values() for r in results] == ["yellow", "yellow"]


def test_grave_and_other_differences_are_two_results():
    found = judged("packages", {}, packages(peft="0.1", tqdm="1.0"), {})["node2"]
    assert [r.level for r in found] == ["red", "yellow"]
    assert found[0].fix == found[1].fix


@pytest.mark.parametrize(
    ("own", "level", "says"),
    [
        ({"torch": LOOK["torch"] | {"nccl": "2.20.5"}}, "red", "nccl 2.20.5, elsewhere 2.27.3"),
        ({"torch": {"cuda": None}}, "red", "cuda is missing, elsewhere 12.8"),
        ({"torch": LOOK["torch"] | {"cudnn": "9.1"}}, "yellow", "cudnn 9.1, elsewhere 9.10.2.21"),
        ({"driver": "535.1"}, "yellow", "driver 535.1, elsewhere 570.86.15"),
    ],
)
def test_other_cuda_libraries(own, level, says):
    result = odd("CUDA libraries", own)
    assert result.level == level
    assert says in result.problem


def test_without_cuda_there_is_no_row_of_it():
    none = {"torch": {"cuda": None}, "driver": None}
    for name in ("CUDA libraries", "CUDA libraries as loaded"):
        with pytest.raises(NotHere):
            judged(name, none, none)


def test_what_is_loaded_counts_besides_what_is_installed():
    loaded = {f"node{n}": {"cuda": "12.8", "cudnn": "91002", "nccl": "2.27.3"} for n in (1, 2, 3)}
    loaded["node2"] = loaded["node2"] | {"nccl": "2.18.1"}
    result = odd("CUDA libraries as loaded", {}, loaded=loaded)
    assert (result.level, result.problem) == ("red", "nccl 2.18.1, elsewhere 2.27.3")
    assert "LD_LIBRARY_PATH" in result.cure


@pytest.mark.parametrize(
    ("own", "level"),
    [({"machine": "aarch64"}, "red"), ({"glibc": "2.31"}, "yellow"), ({"kernel": "5.15.0-1"}, "yellow")],
)
def test_other_systems(own, level):
    assert odd("system", own).level == level


def test_another_patch_of_the_kernel_is_usual():
    assert odd("system", {"kernel": "6.8.0-60-generic"}).level == "green"


# ---- code --------------------------------------------------------------------------------------------------------
def files(**own):
    return {
        f"node{n}": {"files": {"train.py": "1", "brigade/a.py": "2", "requirements.txt": "3"}} for n in (1, 2, 3)
    } | {"node2": {"files": {"train.py": "1", "brigade/a.py": "2", "requirements.txt": "3"} | own}}


def test_a_changed_file_is_named_and_never_overwritten():
    git = {"commit": "a" * 40, "changed": ["train.py"]}
    result = odd("code", {"git": git}, files=files(**{"train.py": "9"}), projects={"node2": "other"})
    assert (result.level, result.problem) == ("red", "train.py differs from node1's")
    assert "git -C" in result.cure
    assert result.fix == ""


def test_another_commit_is_checked_out_where_nothing_was_changed():
    git = {"commit": "b" * 40, "changed": []}
    result = odd("code", {"git": git}, files=files(**{"brigade/a.py": "9"}), projects={"node2": "other"})
    assert result.problem == f"another commit ({'b' * 9}) than node1 ({'a' * 9}); brigade/a.py differs from node1's"
    assert f"git checkout --quiet --detach {'a' * 40}" in result.fix
    assert "git status --porcelain" in result.fix  # looked at once more, where it runs
    reference = {"git": {"commit": "a" * 40, "changed": ["train.py"]}}
    found = judged("code", reference, {"git": git}, reference, files=files(**{"train.py": "9"}))
    assert found["node2"][0].fix == ""
    assert "commit on node1" in found["node2"][0].cure


def test_another_commit_with_the_same_files_is_a_warning():
    result = odd("code", {"git": {"commit": "b" * 40, "changed": []}}, files=files())
    assert result.level == "yellow"
    assert "no file differs" in result.why


def test_another_list_of_pins_is_a_warning():
    result = odd(
        "code", {"git": {"commit": "a" * 40, "changed": ["requirements.txt"]}}, files=files(**{"requirements.txt": "9"})
    )
    assert (result.level, result.value) == ("yellow", "requirements.txt differs")


def test_a_recipe_that_this_run_does_not_read_is_a_warning_and_its_own_is_red():
    git = {"git": {"commit": "a" * 40, "changed": ["recipes/x.yaml"]}}
    other = files(**{"recipes/x.yaml": "9"})
    result = odd("code", git, files=other)
    assert (result.level, result.why) == ("yellow", clone.WHY_OTHERS)
    own = [{"own": {f"{REPOSITORY}/recipes/x.yaml": of}} for of in ("1", "9", "1")]
    found = judged("code", *own, files=files())  # git does not follow it
    assert [found[host][0].level for host in found] == ["green", "red", "green"]
    assert found["node2"][0].problem == "recipes/x.yaml differs from node1's"
    outside = [{"own": {"/home/me/zero.json": of}} for of in ("1", None, "1")]
    found = judged("code", *outside, files=files())
    assert [found[host][0].level for host in found] == ["green", "red", "green"]
    assert "copy /home/me/zero.json from node1 to node2" in found["node2"][0].cure
    assert found["node2"][0].fix == ""


def test_a_clone_without_git_is_compared_by_its_files():
    assert odd("code", {"git": None}, files=files()).level == "green"
    result = odd("code", {"git": None}, files=files(**{"train.py": "9"}), projects={"node2": "other"})
    assert (result.level, result.fix) == ("red", "")
    assert "rsync" in result.cure


def test_files_that_one_clone_lacks_differ():
    assert clone.differing({"a": "1", "b": "2"}, {"a": "1", "c": "2"}) == ["b", "c"]


# ---- variables ---------------------------------------------------------------------------------------------------
def variables(**values):
    return {"variables": LOOK["variables"] | values}


@pytest.mark.parametrize(
    ("own", "level", "says"),
    [
        (variables(NCCL_ALGO={"is": "Tree"}), "red", "NCCL_ALGO is 'Tree'; elsewhere 'Ring'"),
        ({"variables": {"HF_TOKEN": {"hash": "1234"}}}, "red", "NCCL_ALGO is not set; elsewhere it is 'Ring'"),
        (variables(NCCL_P2P_DISABLE={"is": "1"}), "red", "NCCL_P2P_DISABLE is '1'"),
        (variables(NCCL_NET_GDR_LEVEL={"is": "SYS"}), "yellow", "NCCL_NET_GDR_LEVEL is 'SYS'"),
        (variables(OMP_NUM_THREADS={"is": "1"}), "yellow", "OMP_NUM_THREADS is '1'; elsewhere it is not set"),
        (variables(HF_TOKEN={"hash": "9999"}), "yellow", "HF_TOKEN has another value than elsewhere"),
        ({"variables": {"NCCL_ALGO": {"is": "Ring"}}}, "yellow", "HF_TOKEN is not set; elsewhere it is"),
        (variables(https_proxy={"hash": "77"}), "yellow", "https_proxy is set; elsewhere it is not"),
    ],
)
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
def test_what_is_missing_is_red_and_what_leads_elsewhere_a_warning():
    gone = {"paths": LOOK["paths"] | {"code": {"there": False, "real": "/code"}}}
    assert (odd("paths", gone).level, odd("paths", gone).value) == ("red", "no code")
    elsewhere = {"paths": LOOK["paths"] | {"environment": {"there": True, "real": "/scratch/env"}}}
    result = odd("paths", elsewhere)
    assert result.level == "yellow"
    assert "leads to /scratch/env, elsewhere /opt/env" in result.problem


def test_a_recipe_adds_its_data_its_output_and_itself(tmp_path):
    (tmp_path / "hosts").write_text("node1 slots=2\n")
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats/a.jsonl").write_text("")
    words = ["--train_file", f"{tmp_path}/chats/*.jsonl", "--output_dir", str(tmp_path / "run")]
    found = sameness.paths_of(make("recipes/tiny/full.yaml", words, str(tmp_path / "hosts")))
    assert found["output"] == str(tmp_path / "run")
    assert found[f"data {tmp_path}/chats/*.jsonl"] == str(tmp_path / "chats")
    assert {"code", "environment", "recipe"} <= set(found)


def test_paths_are_those_that_the_ranks_find(tmp_path, monkeypatch):
    """A ~ is each rank's own; what is named from here is named from there in full, for probes start elsewhere."""
    (tmp_path / "hosts").write_text("node1 slots=2\n")
    (tmp_path / "mine.jsonl").write_text("")
    (tmp_path / "zero.json").write_text((REPOSITORY / "ds_configs/zero2.json").read_text())
    monkeypatch.chdir(tmp_path)
    for name, path in {
        "mine.jsonl": f"{tmp_path}/mine.jsonl",
        "*.jsonl": str(tmp_path),
        "~/data/a.jsonl": "~/data/a.jsonl",
    }.items():
        words = ["--train_file", name, "--ds_config", "zero.json", "--model_name_or_path", "~/model"]
        job = make("recipes/tiny/full.yaml", words, str(tmp_path / "hosts"))
        found = sameness.paths_of(job)
        assert found[f"data {name}"] == path
        assert found["model"] == "~/model"
        assert sameness.own_files(job) == [str(REPOSITORY / "recipes/tiny/full.yaml"), f"{tmp_path}/zero.json"]


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
    assert pins.meets(version, PINS["torch"])
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
    monkeypatch.setattr(probe, "_version", {"nvidia-nccl-cu12": "2.27.3"}.get)
    assert probe._torch() == {"cuda": "12.8", "cudnn": None, "nccl": "2.27.3"}
    (tmp_path / "version.py").write_text("cuda = None\n")
    assert probe._torch() == {"cuda": None}

"""What check says of hosts that differ: versions or code."""

import sys

import pytest

from brigade.check import sameness
from brigade.check.checks import NotHere
from brigade.check.findings import findings
from brigade.check.probes import sameness as probe
from brigade.errors.versions import meets
from brigade.train.recipe.files import REPOSITORY
from testing.same_hosts import LOOK, PINS, judged, odd, variables


def packages(**versions):
    return {"packages": LOOK["packages"] | versions}


@pytest.mark.parametrize("name", ["python", "packages", "CUDA libraries", "system", "code", "variables", "paths"])
def test_equal_hosts_are_sound(name):
    assert [r.level for found in judged(name, {}, {}).values() for r in found] == ["green", "green"]


# ---- versions ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("package", ["torch", "deepspeed", "accelerate", "transformers", "datasets", "peft"])
def test_what_ranks_exchange_objects_with_is_red(package):
    result = odd("packages", packages(**{package: "0.0.1"}))
    assert result.level == "red" and "pip install" in result.fix and f"{package}==" in result.fix
    assert result.problem.partition(", supported ")[0] == f"{package} 0.0.1, pinned {PINS[package]}"


def test_another_pinned_package_is_a_warning_and_is_installed_in_the_version_that_is_pinned():
    result = odd("packages", packages(tqdm="1.0", numpy=None))
    assert result.level == "yellow"
    assert result.problem == f"tqdm 1.0, pinned {PINS['tqdm']}; numpy is missing, pinned {PINS['numpy']}"
    pins = f"tqdm=={PINS['tqdm']} numpy=={PINS['numpy']}"
    assert result.fix.endswith(f"install --disable-pip-version-check --quiet {pins}")
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
    changed = judged("code", clone("train.py"))
    assert changed["node1"][0].detail == ("train.py",)


def test_the_pin_is_the_reference_and_not_the_majority():
    found = judged("packages", packages(peft="0.1"), packages(peft="0.1"), {})
    levels = {host: [r.level for r in results] for host, results in found.items()}
    assert levels == {"node1": ["red"], "node2": ["red"], "node3": ["green"]}


def test_builds_of_one_version_meet_the_pin_and_must_be_equal():
    result = odd("packages", packages(torch=f"{PINS['torch']}+cpu"))
    assert result.problem == f"torch {PINS['torch']}+cpu, elsewhere {PINS['torch']}+cu128"
    assert result.fix == ""  # PyPI has no such build, and of the version pip would say that it is there
    assert f"torch=={PINS['torch']}+cu128 from the index" in result.cure
    assert meets("2.13.0+cpu", "2.13.0")
    assert not meets("2.13.0", "2.13.0+cpu")
    assert not meets("2.13.0.1", "2.13.0")


def test_all_hosts_with_the_same_other_version_are_warned_and_where_no_run_begins_with_it_they_are_red():
    newer = judged("packages", *[packages(transformers="5.99.0")] * 2)
    assert [r.level for results in newer.values() for r in results] == ["yellow", "yellow"]
    older = judged("packages", *[packages(transformers="5.0")] * 2)
    assert [r.level for results in older.values() for r in results] == ["red", "red"]
    assert "transformers 5.0, pinned" in older["node1"][0].problem and "and later" in older["node1"][0].problem
    assert f"transformers=={PINS['transformers']}" in older["node1"][0].fix


def test_what_all_hosts_lack_was_left_out_by_those_who_installed_them():
    found = judged("packages", packages(matplotlib=None), packages(matplotlib=None))
    assert [r.value for results in found.values() for r in results] == [
        f"torch {PINS['torch']}+cu128, {len(PINS)} pins, 1 not installed"
    ] * 2
    lacking = judged("packages", packages(torch=None), packages(torch=None))
    assert [r.level for results in lacking.values() for r in results] == ["yellow", "yellow"]


def test_grave_and_other_differences_are_two_results():
    found = judged("packages", {}, packages(peft="0.1", tqdm="1.0"), {})["node2"]
    assert [r.level for r in found] == ["red", "yellow"]
    assert found[0].fix == found[1].fix


@pytest.mark.parametrize("check, own, level, says", [
    ("python", {"python": "CPython 3.12.1"}, "red", "CPython 3.12.1, elsewhere CPython 3.11.7"),
    ("CUDA libraries", {"torch": LOOK["torch"] | {"nccl": "2.20.5"}}, "red", "nccl 2.20.5, elsewhere 2.27.3"),
    ("CUDA libraries", {"torch": {"cuda": None}}, "red", "cuda is missing, elsewhere 12.8"),
    ("CUDA libraries", {"torch": LOOK["torch"] | {"cudnn": "9.1"}}, "yellow", "cudnn 9.1, elsewhere 9.10.2.21"),
    ("CUDA libraries", {"driver": "535.1"}, "yellow", "driver 535.1, elsewhere 570.86.15"),
    ("system", {"machine": "aarch64"}, "red", "aarch64"), ("system", {"glibc": "2.31"}, "yellow", "2.31"),
    ("system", {"kernel": "5.15.0-1"}, "yellow", "5.15"),
    ("system", {"kernel": "6.8.0-60-generic"}, "green", ""),  # another patch of the kernel is usual
])  # fmt: skip
def test_how_grave_it_is_that_one_host_differs(check, own, level, says):
    result = odd(check, own)
    assert result.level == level and says in result.problem


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


def test_a_gpu_for_which_torch_has_no_code_is_red_where_a_rank_gets_it():
    why = "torch has no code for this GPU (sm_70): it is built for sm_75"
    lacks = [why, "install torch from PyTorch's index cu126"]
    alike = {"cuda": "12.8", "cudnn": "91002", "nccl": "2.27.3"}
    loaded = {f"node{n}": alike | {"without_code": {gpu: lacks}} for n, gpu in enumerate(("1", "8"), 1)}
    found = judged("CUDA libraries as loaded", {}, {}, loaded=loaded)  # of eight slots
    (red,), (sound,) = found["node1"], found["node2"]
    assert (red.level, red.problem, red.cure) == ("red", f"GPU 1: {lacks[0]}", lacks[1]) and red.why
    assert (sound.level, sound.value) == ("green", "cuda 12.8, cudnn 91002, nccl 2.27.3")


# ---- code --------------------------------------------------------------------------------------------------------
def clone(*changed, commit="a"):
    return {"git": {"commit": commit * 40, "changed": list(changed)}}


def files(**own):
    same = {"train.py": "1", "brigade/a.py": "2", "requirements.txt": "3"}
    return {f"node{n}": {"files": same | (own if n == 2 else {})} for n in (1, 2, 3)}


def test_a_changed_file_is_named_and_never_overwritten():
    result = odd("code", clone("train.py"), files=files(**{"train.py": "9"}), projects={"node2": "other"})
    assert (result.level, result.problem) == ("red", "train.py differs from node1's")
    assert "git -C" in result.cure
    assert result.fix == ""


def test_another_commit_is_checked_out_where_nothing_was_changed():
    result = odd("code", clone(commit="b"), files=files(**{"brigade/a.py": "9"}), projects={"node2": "other"})
    assert result.problem == f"another commit ({'b' * 9}) than node1 ({'a' * 9}); brigade/a.py differs from node1's"
    assert f"git checkout --quiet --detach {'a' * 40}" in result.fix
    assert "git status --porcelain" in result.fix  # looked at once more, where it runs
    found = judged("code", clone("train.py"), clone(commit="b"), clone("train.py"), files=files(**{"train.py": "9"}))
    assert found["node2"][0].fix == ""
    assert "commit on node1" in found["node2"][0].cure


def test_another_commit_with_the_same_files_is_a_warning():
    result = odd("code", clone(commit="b"), files=files())
    assert result.level == "yellow"
    assert "no file differs" in result.why


def test_tools_of_tests_on_one_host_only_are_no_difference():
    """Whoever ran `make test` on one host has them there."""
    assert "torch" in PINS and not {"pytest", "ruff", "pluggy"} & set(PINS)


def test_another_list_of_pins_is_a_warning():
    result = odd("code", clone("requirements.txt"), files=files(**{"requirements.txt": "9"}))
    assert (result.level, result.value) == ("yellow", "requirements.txt differs")


def test_a_recipe_that_this_run_does_not_read_is_a_warning_and_its_own_is_red():
    result = odd("code", clone("recipes/x.yaml"), files=files(**{"recipes/x.yaml": "9"}))
    assert (result.level, result.why) == ("yellow", findings()["other-files-of-other-runs"].why)
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
    assert sameness.differing({"a": "1", "b": "2"}, {"a": "1", "c": "2"}) == ["b", "c"]


# ---- packages that are there by name -----------------------------------------------------------------------------
def test_a_package_that_lost_its_files_is_named_whatever_its_metadata_say():
    found = judged("packages", {}, {"lost": {"tqdm": "tqdm/__init__.py is missing"}}, {})["node2"]
    assert [result.level for result in found] == ["red", "green"]
    assert found[0].problem == "tqdm is installed, but tqdm/__init__.py is missing"
    assert f"--force-reinstall --no-deps tqdm=={PINS['tqdm']}" in found[0].fix
    found = judged("packages", {}, {"lost": {"torch": "torch/__init__.py is empty"}}, {})["node2"]
    assert not found[0].fix and "make clean setup" in found[0].cure, "PyPI has no such build"


def test_a_package_that_cannot_be_imported_is_named():
    said = "ImportError: libgomp.so.1: cannot open shared object file"
    fine = {"failed": {}}
    result = odd("imports", {}, imports={"node1": fine, "node2": {"failed": {"torch": said}}, "node3": fine})
    assert result.level == "red" and result.problem == f"torch cannot be imported: {said}"
    assert "import torch" in result.cure


def installed(folder, name, **files):
    """An installed package: its metadata, and these files, of which RECORD says that they have bytes."""
    record = [f"{path.replace('__', '/', 1)}.py,sha256=x,10" for path in files] + [f"{name}-1.0.dist-info/RECORD,,"]
    for path, text in {f"{name}-1.0.dist-info/METADATA": f"Name: {name}\nVersion: 1.0\n",
                       f"{name}-1.0.dist-info/RECORD": "\n".join(record) + "\n"}.items():  # fmt: skip
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    for path, text in files.items():
        file = folder / f"{path.replace('__', '/', 1)}.py"
        file.parent.mkdir(exist_ok=True)
        if text is not None:
            file.write_text(text)


def test_the_probe_finds_what_is_lost(tmp_path, monkeypatch):
    installed(tmp_path, "whole", whole__a="x = 1")
    installed(tmp_path, "hollow", hollow__a=None)
    installed(tmp_path, "cut", cut__a="x = 1", cut__b="")
    installed(tmp_path, "flat", flat="raise OSError('no such library')")
    monkeypatch.syspath_prepend(tmp_path)
    names = ["whole", "hollow", "cut", "flat", "absent"]
    assert [probe.installed(name) for name in names] == ["1.0", "1.0", "1.0", "1.0", None]
    assert [probe._lost(name) for name in names] == ["", "hollow/a.py is missing", "cut/b.py is empty", "", ""]
    found = probe.imports(["json", "flat", "absent"])["failed"]
    assert found == {"flat": "OSError: no such library", "absent": "ModuleNotFoundError: No module named 'absent'"}

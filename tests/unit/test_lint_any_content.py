"""No file of any content makes lint crash, and what a file is for is told by its content."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from brigade.errors.findings import rules
from brigade.lint.files import key_lines, recognise
from brigade.lint.linter import lint
from brigade.train.strategy import accelerate_config
from brigade.train.strategy.ds_keys import key_table
from testing.lint_files import names, recipe
from testing.ranks import REPOSITORY as ROOT

KEYS = st.sampled_from([*key_table()["allowed"], *key_table()["removed"]]).map(lambda path: path.rpartition(".")[2])
trees = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "nvme", 1e9, 1, 3]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=8), inner, max_size=5),
    max_leaves=25,
)
blocks = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("zero_optimization", "bf16", "optimizer", "tensor_parallel"), trees)
)
ACCELERATE = st.sampled_from([key for keys in accelerate_config.KEYS.values() for key in keys])
configs = st.fixed_dictionaries(
    {"distributed_type": st.sampled_from(["FSDP", "DEEPSPEED", "MULTI_GPU", 3])},
    optional={section: st.dictionaries(ACCELERATE, trees, max_size=4) | trees
              for section in ("deepspeed_config", "fsdp_config", "parallelism_config")},
)  # fmt: skip
machines = st.dictionaries(ACCELERATE, trees | st.integers(1, 9), max_size=5)


@given(st.one_of(trees, blocks, st.dictionaries(KEYS, trees, max_size=6)))
def test_any_json_is_linted(tmp_path_factory, tree):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(tree))
    report = lint([str(path), str(ROOT / "recipes/tiny/full.yaml")])
    for finding in report.findings:
        assert finding.rule in rules() and report.where(finding).startswith(finding.file)


@given(machines, configs)
def test_any_accelerate_config_is_linted(tmp_path_factory, rest, config):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(rest | config))
    lint([str(path), str(ROOT / "recipes/tiny/full.yaml"), str(ROOT / "hostfiles/2x8")])


@given(
    st.sampled_from(["any", "any.json", "any.yaml", ".deepspeed_env", "any.txt"]),
    st.text(max_size=60) | st.binary(max_size=60),
)
def test_any_bytes_are_linted(tmp_path_factory, name, content):
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    lint([str(path)])


@pytest.mark.parametrize("text", [
    "[" * 100_000, '{"a":' * 5_000 + "1" + "}" * 5_000, "model: &a\n  b: *a\n", "model: " + "[\n" * 5_000, "- " * 5_000,
    '{"zero_optimization": {"stage": ' + "9" * 5_000 + "}}", "fsdp_config: &a\n  b: *a\ndistributed_type: *a\n",
    "\ufeff{}", "a: 2024-13-45", "? [a]\n: b\nmodel: {}", "model:\n  1: 2\n  [x]: 3\n", "distributed_type: FSDP\n1: 2\n",
])  # fmt: skip
@pytest.mark.parametrize("name", ["any", "any.json", "any.yaml"])
def test_odd_files_are_linted(check, name, text):
    assert check({name: text}).findings


def test_a_directory_and_a_huge_file_are_told_apart(check, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "core").write_bytes(b"a" * 2_000_000)
    report = check({}, named=["folder", "core", "core"])
    assert [(f.file, f.rule) for f in report.findings] == [("folder", "file-unreadable"), ("core", "file-kind")]


host_names = st.from_regex(r"[a-z][a-z0-9.\-]{0,10}[a-z0-9]", fullmatch=True)


@given(st.dictionaries(host_names, st.integers(1, 16), min_size=1, max_size=6))
def test_a_valid_hostfile_is_recognised_and_has_no_error(tmp_path_factory, hosts):
    path = tmp_path_factory.getbasetemp() / "valid_hosts"
    path.write_text("".join(f"{name}\tslots={slots}\n" for name, slots in hosts.items()))
    report = lint([str(path)])
    assert report.files.open(str(path)).content == hosts and not report.counts()["error"]
    assert ("hostfile-unequal" in names(report)) is (len(set(hosts.values())) > 1)


def test_a_network_without_a_rate_is_found_where_it_stands(check):
    """The planner alone reads it: a run would train, and its estimate would be silently that of another network."""
    (finding,) = check({"r.yaml": recipe(cluster={"network": "fast"})}).findings
    assert (finding.rule, finding.at) == ("recipe-invalid", "cluster.network") and "no rate" in finding.problem
    assert check({"r.yaml": recipe(cluster={"network": "100 Gb/s"})}).findings == []


def test_a_thousand_hosts(check):
    text = "".join(f"node{number:04} slots=8\n" for number in range(1000))
    report = check({"hosts": text, "r.yaml": recipe(training={"global_batch_size": 8000})})
    assert report.findings == []


@pytest.mark.parametrize("name, text, kind", [
    ("2x8", "node1: slots=8", "hostfile"), ("h", "node1\nnode2\n", "hostfile"), ("h", "node1 8\nnode2 8\n", "hostfile"),
    ("x.json", "", "ds_config"), ("x", '{"stage": 3, "zero_optimisation": {}}', "ds_config"), ("x.json", '{"name": "npm"}', None),
    ("config.json", '{"model_type": "llama"}', "model"), ("a.json", '{"distributed_type": "FSDP"}', "accelerate"),
    ("r", "model: {}\n", "recipe"), ("r.yaml", "modle: {}\n", "recipe"), ("r.yaml", "a: [", "recipe"),
    ("a", "num_machines: 2", "accelerate"),
    ("env", "A=1\nB=2\n", "env"), ("my.deepspeed_env", "", "env"), ("README.md", "A text with slots and more.\n", None),
    ("compose.yaml", "services: {}\n", None),
    ("axolotl.yaml", "base_model: a\nbf16: auto\nfp16:\nlora_r: 8\n", "recipe"),
    ("trl.yaml", "model_name_or_path: a\nlearning_rate: 1e-4\nuse_peft: true\n", "recipe"),
    ("swift.json", '{"model": "a", "torch_dtype": "bfloat16", "learning_rate": 1e-4, "lora_rank": 8}', "recipe"),
    ("ds.json", '{"gradient_accumulation_steps": 1, "bf16": {}, "fp16": {}, "optimizer": {}}', "ds_config"),
    ("k8s.yaml", "name: a\nseed: 1\n", None),
    ("a.yaml", "mixed_precision: bf16\nnum_processes: 2\nfsdp_config: {}\n", "accelerate"),
])  # fmt: skip
def test_kinds_are_told_by_content(name, text, kind):
    assert recognise(name, text) == kind


def test_lines_of_keys():
    text = '{\n  "a": {"b": 1,\n  "c": {"d": 2}},\n  "a": 3}'
    assert key_lines(text) == ({"a": 4, "a.b": 2, "a.c": 3, "a.c.d": 3}, [("a", 4)])
    assert key_lines("a:\n  b: 1\nc: [\n") == ({}, [])

"""Each rule of lint fires where it should, the repository is clean, and no file of any content makes it crash."""

import copy
import dataclasses
import inspect
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from brigade.__main__ import main
from brigade.cluster import read_hostfile
from brigade.errors import UserError
from brigade.errors.findings import SEVERITIES, Finding, raise_first, rules
from brigade.lint.files import key_lines, recognise
from brigade.lint.report import lint, markdown, project_files
from brigade.recipe import flags
from brigade.strategy import accelerate_config, deepspeed_config
from brigade.strategy.ds_keys import key_table

ROOT = Path(__file__).parents[2]
ZERO3 = json.loads((ROOT / "ds_configs/zero3.json").read_text())
VARIANTS = yaml.safe_load((ROOT / "tests/unit/lint/zero3_variants.yaml").read_text())
RECIPE = {
    "model": {"model_name_or_path": "recipes/tiny", "tokenizer_name_or_path": "python-docs"},
    "data": {"dataset_name": "python-docs", "chat_template": "chatml"},
    "training": {"global_batch_size": 32},
}
DDP = {"distributed_type": "MULTI_GPU", "num_machines": 2, "num_processes": 16, "main_process_ip": "node1"}
FSDP = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
FILE = {"deepspeed_config_file": "ds_configs/zero3.json"}


def ds(zero=(), **top):
    config = copy.deepcopy(ZERO3)
    config["zero_optimization"].update(zero)
    return config | top


def recipe(**sections):
    document = copy.deepcopy(RECIPE)
    for section, values in sections.items():
        document.setdefault(section, {}).update(values)
    return document


def fsdp(mesh=None, **options):
    more = {"parallelism_config": mesh} if mesh else {}
    return {**FSDP, "fsdp_config": {"fsdp_version": 2, **options}, **more}


def zero(**options):
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": options}


Z = "ds.json:1: zero_optimization"

# rule -> files that break it (name -> text or document), and where it must be found
EXAMPLES = {
    "file-missing": ({"r.yaml": recipe(cluster={"hostfile": "nowhere"})}, "r.yaml:2: cluster.hostfile"),
    "file-unreadable": ({"hosts": b"\xff\xfe"}, "hosts"),
    "file-syntax": ({"r.yaml": "model:\n  - ]\n"}, "r.yaml:2"),
    "file-kind": ({"notes.md": "Dear diary,\ntoday I wrote: a hostfile\n\n    node1 slots=8\n\nand then it rained."}, "notes.md"),
    "file-duplicate-key": ({"ds.json": '{"zero_optimization":\n{"stage": 3},\n"zero_optimization": {"stage": 3}}'}, "ds.json:3"),
    "hostfile-colon": ({"hosts": "node1 slots=8\nnode2: slots=8\n"}, "hosts:2"),
    "hostfile-comment": ({"hosts": "node1 slots=8 # spare\n"}, "hosts:1"),
    "hostfile-slots": ({"hosts": "node1 slots=8\n\nnode2 slot=8\n"}, "hosts:3"),
    "hostfile-duplicate": ({"hosts": "node1 slots=8\nnode1\tslots=4\n"}, "hosts:2"),
    "hostfile-empty": ({"hosts": "# none yet\n"}, "hosts"),
    "hostfile-localhost": ({"hosts": "node1 slots=8\nlocalhost slots=8\n"}, "hosts:2: localhost"),
    "hostfile-unequal": ({"hosts": "a slots=8\nb slots=8\nc slots=4\n"}, "hosts:3: c"),
    "ds-removed-key": ({"ds.json": ds(elasticity={"enabled": True})}, "ds.json:1: elasticity"),
    "ds-removed-optimizer": ({"ds.json": ds(optimizer={"type": "OneBitAdam"})}, "ds.json:1: optimizer"),
    "ds-unknown-key": ({"ds.json": ds({"stag": 3})}, Z + ".stag"),
    "ds-not-a-block": ({"ds.json": ds(bf16=True)}, "ds.json:1: bf16"),
    "ds-auto-not-filled": ({"ds.json": ds({"allgather_bucket_size": "auto"})}, Z + ".allgather_bucket_size"),
    "ds-stage": ({"ds.json": ds({"stage": 4})}, Z + ".stage"),
    "ds-offload-stage": ({"ds.json": ds({"stage": 2, "offload_param": {"device": "cpu"}})}, Z + ".offload_param.device"),
    "ds-nvme-path": ({"ds.json": ds({"offload_optimizer": {"device": "nvme"}})}, Z + ".offload_optimizer.device"),
    "ds-accumulation": ({"ds.json": ds(gradient_accumulation_steps=4)}, "ds.json:1: gradient_accumulation_steps"),
    "ds-optimizer": ({"ds.json": ds(optimizer={"type": "AdamW", "params": {"lr": "auto"}})}, "ds.json:1: optimizer"),
    "ds-axis-size": ({"ds.json": ds(sequence_parallel_size=-2)}, "ds.json:1: sequence_parallel_size"),
    "ds-contradicts-recipe": ({"ds.json": ds(bf16={"enabled": True}), "r.yaml": recipe()}, "ds.json:1: bf16.enabled"),
    "ds-owned-by-recipe": ({"ds.json": ds(train_batch_size=32), "r.yaml": recipe()}, "ds.json:1: train_batch_size"),
    "ds-weights-not-gathered": (
        {"ds.json": {"zero_optimization": {"stage": 3}}},
        Z + ".stage3_gather_16bit_weights_on_model_save",
    ),
    "ds-clipping-absent": ({"ds.json": {"zero_optimization": {"stage": 2}}}, "ds.json: gradient_clipping"),
    "ds-deprecated-key": ({"ds.json": ds({"cpu_offload": True})}, Z + ".cpu_offload"),
    "ds-two-spellings": ({"ds.json": ds({"cpu_offload": True, "offload_optimizer": {}})}, Z + ".offload_optimizer"),
    "ds-wrong-value": ({"ds.json": ds({"overlap_comm": "yes please"})}, Z + ".overlap_comm"),
    "ds-unguarded": ({"ds.json": ds({"compute_grad_norm": False})}, Z + ".compute_grad_norm"),
    "ds-refused-together": ({"ds.json": ds(bf16={"enabled": True}, fp16={"enabled": True})}, "ds.json:1: fp16.enabled"),
    "ds-other-stage": ({"ds.json": ds({"stage": 2, "zero_hpz_partition_size": 8})}, Z),
    "ds-default-written-out": ({"ds.json": ds({"contiguous_gradients": True})}, "ds.json"),
    "ds-overlap-comm": ({"ds.json": {"zero_optimization": {"stage": 2, "overlap_comm": True}}}, Z + ".overlap_comm"),
    "ds-memory-limits": (
        {"ds.json": ds({"max_live_parameters": 0})}, Z + ".stage3_max_live_parameters"),
    "accelerate-distributed-type": ({"a.yaml": {"num_processes": 8}}, "a.yaml: distributed_type"),
    "accelerate-not-a-table": ({"a.yaml": {**FSDP, "fsdp_config": "FULL_SHARD"}}, "a.yaml:2: fsdp_config"),
    "accelerate-not-a-number": ({"a.yaml": fsdp(fsdp_version="two")}, "a.yaml:3: fsdp_config.fsdp_version"),
    "accelerate-unknown-key": ({"a.yaml": DDP | {"num_process": 16}}, "a.yaml:4: num_process"),
    "accelerate-two-sources": ({"a.yaml": zero(**FILE, zero_stage=3)}, "a.yaml:3: deepspeed_config.zero_stage"),
    "accelerate-fsdp1": ({"a.yaml": {**FSDP, "fsdp_config": {"a": 1}}}, "a.yaml:2: fsdp_config.fsdp_version"),
    "accelerate-fsdp2-value": (
        {"a.yaml": fsdp(fsdp_reshard_after_forward="FULL_SHARD")}, "a.yaml:3: fsdp_config.fsdp_reshard_after_forward"),
    "accelerate-fsdp1-option": (
        {"a.yaml": fsdp(fsdp_sharding_strategy="FULL_SHARD")}, "a.yaml:3: fsdp_config.fsdp_sharding_strategy"),
    "accelerate-full-state-dict": (
        {"a.yaml": fsdp(fsdp_state_dict_type="FULL_STATE_DICT")}, "a.yaml:3: fsdp_config.fsdp_state_dict_type"),
    "accelerate-owned-by-recipe": (
        {"a.yaml": fsdp(fsdp_activation_checkpointing=True)}, "a.yaml:3: fsdp_config.fsdp_activation_checkpointing"),
    "accelerate-precision": (
        {"a.yaml": {**FSDP, "mixed_precision": "fp16"}, "r.yaml": recipe(training={"bf16": True})}, "a.yaml:4: mixed_precision"),
    "accelerate-parallelism": (
        {"a.yaml": fsdp({"parallelism_config_cp_size": 2})}, "a.yaml:5: parallelism_config.parallelism_config_cp_size"),
    "accelerate-own-key": (
        {"a.yaml": fsdp({"parallelism_config_ep_size": 2})}, "a.yaml:5: parallelism_config.parallelism_config_ep_size"),
    "accelerate-mesh": (
        {"a.yaml": fsdp({"parallelism_config_dp_replicate_size": 2}) | {"num_processes": 8}}, "a.yaml:5: parallelism_config"),
    "accelerate-processes": ({"a.yaml": DDP | {"num_processes": 15}}, "a.yaml:4: num_processes"),
    "accelerate-machine-rank": ({"a.yaml": DDP | {"machine_rank": 1}}, "a.yaml:2: machine_rank"),
    "accelerate-loopback": ({"a.yaml": DDP | {"main_process_ip": "127.0.0.1"}}, "a.yaml:2: main_process_ip"),
    "accelerate-hosts": ({"a.yaml": DDP, "hosts": "node1 slots=8\n"}, "a.yaml:3: num_machines"),
    "accelerate-environment-file": ({"a.yaml": zero(**FILE) | {"num_machines": 2, "num_processes": 16}},
                                    "a.yaml:1: deepspeed_config.deepspeed_multinode_launcher"),
    "recipe-invalid": ({"r.yaml": recipe(training={"learning_rat": 1e-5})}, "r.yaml:9: training.learning_rat"),
    "recipe-strategy": (
        {"r.yaml": recipe(cluster={"ds_config": ZERO3, "accelerate_config": "accelerate_configs/ddp_1x2.yaml"})},
        "r.yaml:1: cluster"),
    "recipe-batch": ({"r.yaml": recipe(), "hosts": "node1 slots=33\n"}, "r.yaml:8: training.global_batch_size"),
    "recipe-filler": ({"r.yaml": recipe(), "hosts": "node1 slots=5\n"}, "r.yaml:8: training.global_batch_size"),
    "recipe-heads": (
        {"r.yaml": recipe(cluster={"ds_config": "ds_configs/zero3_sp2.json"}), "config.json": {"num_attention_heads": 7}},
        "r.yaml:7: model.model_name_or_path"),
    "recipe-moe-zero3": (
        {"r.yaml": recipe(cluster={"ds_config": "ds_configs/zero3.json"}),
         "config.json": {"model_type": "qwen3_moe", "num_experts": 128}},
        "r.yaml:7: model.model_name_or_path"),
    "recipe-experts": (
        {"r.yaml": recipe(cluster={"accelerate_config": "accelerate_configs/fsdp2_ep2_1x4.yaml"}),
         "config.json": {"model_type": "qwen3_moe", "num_experts": 7}},
        "r.yaml:7: model.model_name_or_path"),
    "env-line": ({".deepspeed_env": "NCCL_DEBUG=INFO\n\nA=1\n"}, ".deepspeed_env:2"),
}  # fmt: skip


@pytest.fixture
def check(tmp_path, monkeypatch):
    """check({"name": text or document}): lint's report on these files, named together, from their own directory."""
    monkeypatch.chdir(tmp_path)

    def call(files, named=None):
        for name, content in files.items():
            if isinstance(content, dict):
                content = json.dumps(content) if name.endswith(".json") else yaml.safe_dump(content)
            Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return lint(list(files) if named is None else named)

    return call


def names(report):
    return {finding.rule for finding in report.findings}


# ---- every rule --------------------------------------------------------------------------------------------------
def test_every_rule_has_an_example():
    assert set(EXAMPLES) == set(rules())


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_rule_fires_where_it_is_broken(check, rule, capsys):
    files, where = EXAMPLES[rule]
    report = check(files)
    fired = [finding for finding in report.findings if finding.rule == rule]
    assert where in [report.where(finding) for finding in fired], [report.where(f) for f in report.findings]
    assert all(len(f.problem) < 400 and len(f.cure) < 400 and f.problem and f.cure for f in report.findings)
    severity = rules()[rule].severity
    assert main(["lint", *files]) == (1 if severity == "error" or report.counts()["error"] else 0)
    printed = capsys.readouterr().out
    assert f"{severity} {rule}: " in printed and all(issue in printed for issue in rules()[rule].issues)
    assert max(map(len, printed.splitlines())) < 1000 and "Traceback" not in printed


@pytest.mark.parametrize("rule", EXAMPLES)
def test_its_mended_neighbour_is_silent(check, rule):
    clean = {
        "ds.json": ZERO3,
        "r.yaml": recipe(),
        "hosts": "# two\n\nnode1\tslots=8\nnode2 slots=8\n",
        ".deepspeed_env": "A=b=c\n",
    }
    assert rule not in names(check(clean | {"a.yaml": DDP}))


def test_every_rule_is_described():
    for rule in rules().values():
        assert rule.severity in SEVERITIES and rule.says.endswith(".") and "|" not in rule.says, rule.name
        assert rule.name == rule.name.lower() and " " not in rule.name
        assert all("#" in issue or ".py" in issue for issue in rule.issues), rule.name


# ---- the repository ----------------------------------------------------------------------------------------------
def test_the_repository_is_clean(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    report = lint([])
    assert report.shown(notes=False) == [] and not report.counts()["warning"]
    assert {str(path) for path in report.files.read} >= {str(ROOT / name) for name in project_files()}
    assert len(project_files()) >= 24
    assert main(["lint"]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_from_elsewhere_it_is_the_clones_files(check):
    assert names(check({})) <= {"accelerate-environment-file", "accelerate-own-key"}
    assert "ds_configs/zero3.json" in project_files()


def test_in_a_project_of_ones_own_it_is_its_files(check, tmp_path):
    (tmp_path / "hostfiles").mkdir()
    (tmp_path / "hostfiles" / "mine").write_text("node1: slots=8\n")
    assert "hostfiles/mine" in project_files() and "hostfiles/2x8" not in project_files()
    assert "hostfile-colon" in names(check({}, named=[]))


def test_nothing_heavy_is_imported():
    code = "import sys; from brigade.__main__ import main; main(['lint']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "transformers", "deepspeed", "accelerate", "datasets", "numpy"} & set(done.stdout.split())


def test_the_page_of_rules_is_up_to_date():
    assert (ROOT / "docs/lint.md").read_text().endswith(markdown())


# ---- several files -----------------------------------------------------------------------------------------------
def test_a_bad_file_does_not_hide_another(check):
    report = check({"bad.json": '{"a": ', "hosts": "node1: slots=8\n"}, ["bad.json", "nowhere", "hosts"])
    assert names(report) == {"file-syntax", "file-missing", "hostfile-colon"}
    assert [report.where(finding) for finding in report.findings] == ["bad.json:1", "nowhere", "hosts:1"]


def test_named_files_take_the_place_of_the_recipes_own(check):
    own = recipe(
        cluster={"ds_config": "ds_configs/zero3.json", "hostfile": "hostfiles/2x8"}, training={"global_batch_size": 48}
    )
    assert check({"r.yaml": own}).findings == []
    assert names(check({"r.yaml": own, "ds.json": ds(fp16={"enabled": True})})) == {"ds-contradicts-recipe"}
    report = check({"r.yaml": own, "hosts": "node1 slots=32\n"})
    assert names(report) == {"recipe-filler"} and "25.0% of each step is filler (hosts)" in report.findings[0].problem
    mesh = fsdp({"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 8})
    assert check({"r.yaml": own, "a.yaml": mesh | {"num_processes": 16}}).findings == []
    assert check({"r.yaml": own, "a.yaml": mesh}).findings == []  # the recipe's own 16 slots
    assert names(check({"r.yaml": own, "a.yaml": mesh, "hosts": "node1 slots=8\n"})) == {"recipe-strategy"}


def test_several_recipes_and_hostfiles_are_not_mixed(check):
    files = {"r.yaml": recipe(), "s.yaml": recipe(), "hosts": "a slots=8\n", "other": "a slots=5\n"}
    assert check(files).findings == []
    del files["hosts"]
    assert names(check(files)) == {"recipe-filler"}


def test_what_a_file_refers_to_is_linted_too(check):
    named = zero(deepspeed_config_file="ds.json", deepspeed_hostfile="hosts")
    files = {"ds.json": ds(elasticity={}), "hosts": "node1: slots=8\n", "a.yaml": named}
    assert names(check(files, ["a.yaml"])) >= {"ds-removed-key", "hostfile-colon"}
    wrong = zero(deepspeed_config_file="hosts")
    report = check({"hosts": "node1 slots=8\n", "a.yaml": wrong}, ["a.yaml"])
    assert [report.where(f) for f in report.findings] == ["a.yaml:2: deepspeed_config.deepspeed_config_file"]
    report = check({"r.yaml": recipe(cluster={"ds_config": "hosts"})}, ["r.yaml"])
    assert names(report) == {"file-kind"} and "hosts is a hostfile" in report.findings[0].problem


@pytest.mark.parametrize("key, content", [
    ("ds_config", ds(elasticity={})), ("accelerate_config", zero(zero_stage=5)), ("accelerate_config", {"distributed_type": "X"}),
    ("accelerate_config", zero(zero_stage=2, gradient_clipping=0.5)),
])  # fmt: skip
def test_a_strategy_inside_a_recipe_is_linted(check, key, content):
    report = check({"r.yaml": recipe(cluster={key: content})})
    assert report.counts()["error"] == 1 and f"r.yaml: cluster.{key}" in report.where(report.findings[0])


@pytest.mark.parametrize("config, found", [({"num_experts": 8}, set()), ({}, {"recipe-experts"}), ("[", set())])
def test_experts_over_ranks_divide(check, config, found):
    """Without num_processes and hosts it is looked at on as many ranks as a group has."""
    mesh = fsdp({"parallelism_config_ep_size": 2})
    mine = {key: value for key, value in mesh.items() if key != "num_processes"}
    files = {"r.yaml": recipe(cluster={"accelerate_config": mine}), "config.json": config}
    assert names(check(files, ["r.yaml"])) == found


def test_a_mixture_of_experts_under_zero3(check):
    def under(config, strategy="ds_configs/zero3.json", **model):
        files = {"r.yaml": recipe(cluster={"ds_config": strategy}, model=model), "config.json": config}
        return names(check(files, ["r.yaml"]))

    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        assert under({key: 8}) == under({"text_config": {key: 8}}) == {"recipe-moe-zero3"}
        assert under({key: 8}, use_peft=True) == {"recipe-moe-zero3"}  # frozen weights are gathered too
        assert under({key: 8}, "ds_configs/zero2.json") == under({key: 1}) == set()
    assert under({"num_experts": 8}, ds({"leaf_module": {"classes": ["MoE"]}})) == set()
    assert under("[") == under('{"num_experts": ') == set()


def test_notes_are_for_named_files(check, capsys):
    files = {"ds.json": ds({"overlap_comm": False}), "r.yaml": recipe(cluster={"ds_config": "ds.json"})}
    check(files)
    for argv, shown in ((["ds.json"], True), (["r.yaml"], False), (["r.yaml", "--notes"], True)):
        assert main(["lint", *argv]) == 0
        printed = capsys.readouterr().out
        assert ("ds-overlap-comm" in printed) is shown and "1 note" in printed and ("--notes" in printed) is not shown


def test_rules_and_misuse(capsys):
    assert main(["lint", "--explain", "ds-overlap-comm"]) == 0
    assert "DeepSpeed #5347" in capsys.readouterr().out
    assert main(["lint", "--rules", "--markdown"]) == main(["lint", "--rules"]) == 0
    assert "hostfile-colon" in capsys.readouterr().out
    assert main(["lint", "--explain", "ds-overlap"]) == 2
    assert "'ds-overlap-comm'" in capsys.readouterr().err
    assert main(["lint", "--markdown"]) == 2


# ---- what values mean --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_difference_of_a_well_known_file_is_explained(check, variant):
    config = copy.deepcopy(ZERO3)
    for key, value in VARIANTS[variant]["differences"].items():
        (config if key == "zero_allow_untested_optimizer" else config["zero_optimization"])[key] = value
    found = check({"ds.json": config}).findings
    assert len(found) <= 3 and {finding.severity for finding in found} == {"note"}
    text = " ".join(finding.problem for finding in found)
    for key, word in VARIANTS[variant]["explained"].items():
        assert key in text.replace("stage3_", "") and word in text, (key, text)


@pytest.mark.parametrize("path", key_table()["meanings"])
def test_every_value_of_an_explained_key_is_spoken_of_once(check, path):
    for stage in (1, 2, 3):
        for value in (True, False) if path.endswith("comm") else (0, 5, 1e9, 10**12):
            zero, key = {"stage": stage}, path.rpartition(".")[2]
            zero |= {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
            found = check({"ds.json": {**ZERO3, "zero_optimization": zero | {key: value}}}).findings
            assert len(found) == 1 and key in found[0].problem and not found[0].problem.endswith(": "), (stage, value)


# Files as axolotl and LLaVA have them, the two keys of the recipe's numbers aside: sound, with at most two lines of notes.
FP16 = {
    "enabled": "auto",
    "auto_cast": False,
    "loss_scale": 0,
    "initial_scale_power": 32,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
OWNED = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
AUTO = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
)
SOUND = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, **AUTO}


@pytest.mark.parametrize(
    "zero, top",
    [
        (
            {
                "sub_group_size": 0,
                "max_live_parameters": 0,
                "max_reuse_distance": 0,
                "gather_16bit_weights_on_model_save": True,
            },
            {"gradient_clipping": "auto", "wall_clock_breakdown": False},
        ),
        (
            {
                "sub_group_size": 1e9,
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            {"steps_per_print": 1e5},
        ),
    ],
)
def test_files_of_well_known_projects_are_sound(check, load, zero, top):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        settings = load()
    config = {"zero_optimization": SOUND | zero, "bf16": {"enabled": "auto"}, "fp16": FP16, **OWNED, **top}
    report = check({"ds.json": config})
    assert len(report.findings) <= 2 and set(report.counts()) == {"note"}
    taken = deepspeed_config.check(config, "ds.json", settings)
    assert taken["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


# ---- one home for a rule -----------------------------------------------------------------------------------------
def test_only_errors_stop_a_run():
    warning, error = (Finding(rule, "f", "k", "p", "c") for rule in ("ds-owned-by-recipe", "ds-stage"))
    raise_first([warning, warning])
    with pytest.raises(UserError, match="f: k"):
        raise_first([warning, error])


@pytest.mark.parametrize("rule", [rule for rule in EXAMPLES if rule.startswith(("ds-", "hostfile-"))])
def test_a_run_refuses_what_lint_calls_an_error(check, rule, load):
    files, _ = EXAMPLES[rule]
    report = check(files)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        settings = load()
    try:
        if "hosts" in files:
            read_hostfile(Path("hosts"))
        else:
            deepspeed_config.check(deepspeed_config.read("ds.json", "")[1], "ds.json", settings)
    except UserError as error:
        assert (error.problem, error.cure) in [
            (f.problem.replace("r.yaml", str(settings.recipe_path)), f.cure)
            for f in report.findings
            if f.severity == "error"
        ]
    else:
        assert not report.counts()["error"]


@pytest.mark.parametrize(
    "name, text",
    [
        ("ds.json", '{"zero_optimization": {"stage": 3,\n"stage": 2}}'),
        ("a.yaml", "distributed_type: FSDP\ndistributed_type: NO\n"),
        ("r.yaml", yaml.safe_dump(RECIPE) + "training:\n  global_batch_size: 64\n"),
    ],
)
def test_a_run_refuses_a_key_that_stands_twice(check, load, mistake, name, text):
    assert names(check({name: text})) == {"file-duplicate-key"}
    read = {"ds.json": lambda: deepspeed_config.read(name, ""), "a.yaml": lambda: accelerate_config.read(name, "")}
    assert "stands twice" in mistake(read.get(name, lambda: flags.load(["--recipe", name])))


def test_a_pipelines_schedule_is_known_and_noted(check):
    mesh = {f"parallelism_config_{key}": value for key, value in
            {"tp_size": 2, "pp_size": 2, "pp_virtual_stages": 2, "pp_schedule": "interleaved1f1b"}.items()}  # fmt: skip
    found = check({"a.yaml": DDP | {"num_machines": 1, "parallelism_config": mesh}})
    assert names(found) == {"accelerate-own-key"}
    assert {one.at.rpartition("_config_")[2] for one in found.findings} == {
        "pp_size",
        "pp_virtual_stages",
        "pp_schedule",
    }


def test_accelerates_keys_are_those_of_the_installed_accelerate():
    from accelerate.commands import launch
    from accelerate.commands.config.config_args import BaseConfig, ClusterConfig
    from accelerate.commands.to_fsdp2 import ARGUMENT_KEY_MAPPING, ConversionStatus

    known = accelerate_config.KEYS
    converted = {
        key for key in ("fp16", "dynamo_backend") if f'"{key}" in config_dict' in inspect.getsource(BaseConfig)
    }
    assert set(known["top_level"]) == {field.name for field in dataclasses.fields(ClusterConfig)} | converted
    options = set(vars(launch.launch_command_parser().parse_args(["x.py"])))
    for section, prefix in (("fsdp_config", "fsdp_"), ("parallelism_config", "parallelism_config_")):
        assert set(known[section]) == {key for key in options if key.startswith(prefix)}, section
    zero_words = ("deepspeed_", "zero", "offload_", "gradient_")
    made_by_the_launcher = {"deepspeed_fields_from_accelerate_config"}
    assert (
        set(known["deepspeed_config"]) == {key for key in options if key.startswith(zero_words)} - made_by_the_launcher
    )
    gone = {key for key, new in ARGUMENT_KEY_MAPPING.items() if isinstance(new, ConversionStatus)}
    assert set(known["fsdp1_only"]) == gone | {"fsdp_sharding_strategy"}
    assert version("accelerate").startswith("1.15")  # as the file says


# ---- any content at all ------------------------------------------------------------------------------------------
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
    "[" * 100_000, '{"a":' * 5_000 + "1" + "}" * 5_000, "model: &a\n  b: *a\n", "model: " + "[" * 5_000, "- " * 5_000,
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
])  # fmt: skip
def test_kinds_are_told_by_content(name, text, kind):
    assert recognise(name, text) == kind


def test_lines_of_keys():
    text = '{\n  "a": {"b": 1,\n  "c": {"d": 2}},\n  "a": 3}'
    assert key_lines(text) == ({"a": 4, "a.b": 2, "a.c": 3, "a.c.d": 3}, [("a", 4)])
    assert key_lines("a:\n  b: 1\nc: [\n") == ({}, [])

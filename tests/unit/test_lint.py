"""Each rule of lint fires where it should, the repository is clean, and a run refuses what lint calls an error."""

import dataclasses
import inspect
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from brigade.__main__ import main
from brigade.errors import UserError
from brigade.errors.findings import SEVERITIES, Finding, raise_first, rules
from brigade.lint.linter import lint, markdown, project_files
from brigade.lint.together import EXPERTS
from brigade.train.recipe import flags
from brigade.train.recipe.hostfile import read_hostfile
from brigade.train.strategy import accelerate_config, deepspeed_config
from testing.lint_files import CHATS, DDP, EXAMPLES, RECIPE, ZERO3, ds, fsdp, names, recipe, zero
from testing.ranks import REPOSITORY as ROOT
from testing.shipped import NAMES

OTHERS = (".md", "config.json", ".py", ".jsonl", ".txt", ".parquet", "tokenizer.json", ".jinja")
OURS = [name for name in NAMES if not name.endswith(OTHERS)]


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


@pytest.mark.parametrize("ds_config, config, said", [
    ({"tensor_parallel": {"autotp_size": 4}}, {"num_attention_heads": 8, "num_key_value_heads": 2}, "num_key_value_heads 2"),
    ({"tensor_parallel": {"autotp_size": 2}}, {"intermediate_size": 129}, "intermediate_size 129"),
    ({"pipeline": {"stages": 8}}, {"num_hidden_layers": 6}, "num_hidden_layers 6 (llama) does not go over a pipeline size of 8"),
    ({"pipeline": {"stages": 2, "virtual_stages": 4}}, {"num_hidden_layers": 6}, "pipeline size of 8"),
])  # fmt: skip
def test_a_model_that_an_axis_cannot_divide(check, ds_config, config, said):
    strategy = {"zero_optimization": {"stage": 1}} | ds_config
    report = check({"r.yaml": recipe(cluster={"ds_config": strategy}), "config.json": config | {"model_type": "llama"}})
    assert [finding.rule for finding in report.findings if finding.severity == "error"] == ["recipe-sizes"]
    assert any(said in finding.problem for finding in report.findings)


def test_their_mended_neighbours_are_silent(check):
    hosts = "# two\n\nnode1\tslots=8\nnode2 slots=8\n"
    clean = {"ds.json": ZERO3, "r.yaml": recipe(), "hosts": hosts, ".deepspeed_env": "A=b=c\n", "a.yaml": DDP}
    assert names(check(clean)) == set()


def test_every_rule_is_described():
    for rule in rules().values():
        assert rule.severity in SEVERITIES and rule.says.endswith(".") and "|" not in rule.says, rule.name
        assert rule.name == rule.name.lower() and " " not in rule.name
        assert all("#" in issue or ".py" in issue for issue in rule.issues), rule.name


# ---- the repository ----------------------------------------------------------------------------------------------
def test_the_repository_is_clean(monkeypatch, prints):
    monkeypatch.chdir(ROOT)
    assert set(project_files()) >= set(OURS)
    monkeypatch.setattr("brigade.lint.linter.project_files", lambda: OURS)  # a user's own are no part of it
    report = lint([])
    assert report.shown(notes=False) == [] and not report.counts()["warning"]
    assert {str(path) for path in report.files.read} >= {str(ROOT / name) for name in OURS}
    assert len(OURS) >= 24
    assert prints(0, "lint").count("\n") == 1


def test_from_elsewhere_it_is_the_clones_files(check):
    assert names(check({})) <= {"accelerate-environment-file", "accelerate-own-key", "recipe-output"}
    assert "ds_configs/zero3.json" in project_files()


def test_in_a_project_of_ones_own_it_is_its_files(check, tmp_path):
    (tmp_path / "hostfiles").mkdir()
    (tmp_path / "hostfiles" / "mine").write_text("node1: slots=8\n")
    assert "hostfiles/mine" in project_files() and "hostfiles/2x8" not in project_files()
    assert "hostfile-colon" in names(check({}, named=[]))


def test_the_page_of_rules_is_up_to_date():
    assert (ROOT / "docs/lint.md").read_text().endswith(markdown())


# ---- objectives over preferences ---------------------------------------------------------------------------------
JUDGED = str(ROOT / "tests/data/preferences/judged.jsonl")
PAIRS = str(ROOT / "tests/data/preferences/pairs.jsonl")


@pytest.mark.parametrize("objective, more, rule, at", [
    ("orpo", {"reference": "model"}, "recipe-invalid", "training.reference"),
    ("sft", {"beta": 0.2}, "recipe-invalid", "training.beta"),
    ("dpo", {"loss_type": "kto"}, "recipe-invalid", "training.loss_type"),
    ("dpo", {"sync_every": 10}, "recipe-strategy", "training.sync_every"),
    ("reward", {"tiled_loss": True}, "recipe-strategy", "training.tiled_loss"),
    ("reward", {"eval_tasks": ["gsm8k"]}, "recipe-strategy", "training.eval_tasks"),
])  # fmt: skip
def test_keys_that_contradict_an_objective_are_found(check, objective, more, rule, at):
    report = check({"r.yaml": recipe(data={"dataset_name": "a/set"}, training={"objective": objective} | more)})
    assert [(finding.rule, finding.at) for finding in report.findings] == [(rule, at)]


@pytest.mark.parametrize("axes", ["zero1_tp2", "zero1_pp2"])
def test_a_second_model_beside_a_divided_one_is_found(check, axes):
    training = {"objective": "dpo", "precompute_ref_log_probs": False}
    cluster = {"ds_config": f"ds_configs/{axes}.json"}
    report = check({"r.yaml": recipe(data={"dataset_name": "a/set"}, training=training, cluster=cluster)})
    assert ("recipe-strategy", "training.reference") in [(finding.rule, finding.at) for finding in report.findings]


@pytest.mark.parametrize("objective, file, wrong", [
    ("dpo", PAIRS, False), ("dpo", JUDGED, True),
    ("kto", PAIRS, False), ("kto", JUDGED, False), ("sft", JUDGED, True),
])  # fmt: skip
def test_rows_that_are_no_preference_are_found(check, objective, file, wrong):
    data = {"dataset_name": None, "train_file": file}
    assert ("recipe-rows" in names(check({"r.yaml": recipe(data=data, training={"objective": objective})}))) == wrong


# ---- data --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows, columns, rule, said", [
    ('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": ""}', {}, "recipe-rows", "rows.jsonl, line 2"),
    ('{"question": "a", "reply": "b"}', {}, "recipe-rows", "columns: {prompt: question}"),
    ('{"prompt": "a", "completion": "b", "weight": "much"}', {"weight": "weight"}, "recipe-rows", "much"),
    ('{"prompt": "a", "completion": "b", "system": "Be brief."}', {}, "", ""),
    ('{"prompt": "a", "completion": "b", "source": "c"}', {"ignore": "source"}, "", ""),
    ('{"messages": [{"role": "user", "content": "a", "mood": 1}, {"role": "assistant", "content": "b"}], "id": 3}', {},
     "recipe-unread", "column 'id'"),
])  # fmt: skip
def test_the_first_rows_are_read_as_a_run_reads_them(check, rows, columns, rule, said):
    data = {"dataset_name": None, "train_file": "rows.jsonl", "columns": columns}
    report = check({"r.yaml": recipe(data=data), "rows.jsonl": rows}, named=["r.yaml"])
    assert [finding.rule for finding in report.findings] == [rule] * bool(rule)
    assert all(said in f"{finding.problem} {finding.cure}" for finding in report.findings)


@pytest.mark.parametrize("section, values, problem", [
    ("model", {"model_name_or_path": "./nowhere"}, "there is no ./nowhere"),
    ("training", {"objective": "distill", "teacher": "./nowhere"}, "there is no ./nowhere"),
    ("model", {"model_name_or_path": "output/sft/last"}, "there is no output/sft/last"),
    ("model", {"use_peft": True, "adapter_name_or_path": "./nowhere"}, "there is no ./nowhere"),
    ("model", {"tokenizer_name_or_path": "$MODEL"}, "nobody replaces $MODEL in a recipe"),
    ("data", {"chat_template": "mine.jinja"}, "there is no chat template (or one of: "),
    ("data", {"dataset_name": None, "train_file": "${HOME}/a.jsonl"}, "nobody replaces ${HOME} in a recipe"),
    ("data", {"dataset_name": None, "train_file": CHATS, "validation_file": "held.jsonl"}, "there is no data file"),
    ("data", {"train_file": CHATS}, "both dataset_name and train_file are given"),
    ("data", {"dataset_name": None, "datasets": [{"train_file": CHATS}, {"train_file": CHATS}]}, "two sources are called"),
    ("data", {"dataset_name": None, "datasets": [{"name": "a", "train_file": CHATS, "weight": 0.9}]}, "the weights 0.9 add up"),
    ("data", {"dataset_name": None, "datasets": [{"train_file": CHATS, "colums": {}}]}, "there is no such key"),
])  # fmt: skip
def test_what_is_named_and_not_there_or_contradicts_itself(check, section, values, problem):
    report = check({"r.yaml": recipe(**{section: values})}, named=["r.yaml"])
    (error,) = (finding for finding in report.findings if finding.severity == "error")
    assert error.problem.startswith(problem)


@pytest.mark.parametrize("path", ["outputs/sft", "./outputs/sft"])
def test_a_model_that_a_run_will_leave_in_outputs_is_no_error(check, path):
    report = check({"r.yaml": recipe(model={"model_name_or_path": path})}, named=["r.yaml"])
    assert [(each.rule, each.severity) for each in report.findings] == [("recipe-output", "note")]


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


@pytest.mark.parametrize("config, found", [
    ({"distributed_type": "NO"}, True), ({"distributed_type": "NO", "num_processes": 1}, False), ({"use_cpu": True}, True),
    ({"distributed_type": "MULTI_CPU", "use_cpu": True}, False), ({"use_cpu": False}, False),
], ids=str)  # fmt: skip
def test_where_accelerate_starts_one_process_several_are_too_many(check, config, found):
    report = check({"a.yaml": {"distributed_type": "MULTI_GPU", "num_processes": 2} | config})
    assert ("accelerate-processes" in names(report)) is found and len(report.findings) == found


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


def test_experts_are_divided_by_expert_parallelism_and_not_by_tensor_parallelism_alone(check):
    def under(config, mesh):
        mine = fsdp({f"parallelism_config_{axis}_size": size for axis, size in mesh.items()}) | {"num_processes": 8}
        return names(check({"r.yaml": recipe(cluster={"accelerate_config": mine}), "config.json": config}, ["r.yaml"]))

    both = {"dp_shard": 4, "tp": 2}
    for key in EXPERTS:
        assert under({key: 8}, both) == under({"text_config": {key: 8}}, both) == {"recipe-sizes"}
        assert under({key: 8}, {"dp_shard": 8}) == under({key: 1}, both) == set()
        assert under({key: 8}, {**both, "ep": 2}) == set()
    assert under("[", both) == under('{"num_experts": ', both) == set()


def test_the_config_of_a_model_in_a_folder_goes_before_the_one_beside_the_recipe(check, tmp_path):
    model, mesh = {"model_name_or_path": str(tmp_path / "model")}, fsdp({"parallelism_config_ep_size": 2})
    files = {"r.yaml": recipe(cluster={"accelerate_config": mesh}, model=model), "config.json": {"num_experts": 4}}
    (tmp_path / "model").mkdir()
    assert names(check(files, ["r.yaml"])) == set()
    (tmp_path / "model/config.json").write_text('{"num_experts": 5}')
    assert names(check(files, ["r.yaml"])) == {"recipe-experts"}


@pytest.mark.slow  # reads the config classes of every architecture
def test_no_experts_are_divided_by_tensor_groups_alone():
    from transformers import CONFIG_MAPPING

    from brigade.train.engines.parallel import tensor

    divided = set()
    for name in CONFIG_MAPPING:
        with suppress(Exception):  # some have no defaults
            text = CONFIG_MAPPING[name]().get_text_config()
            if any(isinstance(getattr(text, key, None), int) for key in EXPERTS) and not tensor.check(text, 1):
                divided.add(name)
    assert not divided


def test_parts_of_a_divided_matrix_that_fsdp2_cannot_shard(check):
    """Qwen3-8B over three data-parallel ranks; over four it goes."""
    shape = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288}
    for shards, found in ((3, ["recipe-sizes"]), (4, [])):
        mesh = fsdp({"parallelism_config_dp_shard_size": shards, "parallelism_config_tp_size": 2})
        mine = {"accelerate_config": mesh | {"num_processes": 2 * shards}}
        report = check({"r.yaml": recipe(cluster=mine), "config.json": shape}, ["r.yaml"])
        said = [finding for finding in report.findings if finding.rule == "recipe-sizes"]
        assert [finding.rule for finding in said] == found
        assert not said or ("evenly over 3 ranks" in said[0].problem and "ZeRO" in said[0].cure)


def test_notes_are_for_named_files(check, prints):
    files = {"ds.json": ds({"overlap_comm": False}), "r.yaml": recipe(cluster={"ds_config": "ds.json"})}
    check(files)
    for argv, shown in ((["ds.json"], True), (["r.yaml"], False), (["r.yaml", "--notes"], True)):
        printed = prints(0, "lint", *argv)
        assert ("ds-overlap-comm" in printed) is shown and "1 note" in printed and ("--notes" in printed) is not shown


def test_rules_and_misuse(prints):
    assert "DeepSpeed #5347" in prints(0, "lint", "--rules", "--markdown")
    assert "hostfile-colon" in prints(0, "lint", "--rules")
    assert main(["lint", "--markdown"]) == 2


# ---- one home for a rule -----------------------------------------------------------------------------------------
def test_only_errors_stop_a_run(mistake):
    warning, error = (Finding(rule, "f", "k", "p", "c") for rule in ("ds-owned-by-recipe", "ds-stage"))
    raise_first([warning, warning])
    assert "f: k" in mistake(raise_first, [warning, error])


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


@pytest.mark.parametrize("name, text", [
    ("ds.json", '{"zero_optimization": {"stage": 3,\n"stage": 2}}'),
    ("a.yaml", "distributed_type: FSDP\ndistributed_type: NO\n"),
    ("r.yaml", yaml.safe_dump(RECIPE) + "training:\n  global_batch_size: 64\n"),
])  # fmt: skip
def test_a_run_refuses_a_key_that_stands_twice(check, load, mistake, name, text):
    assert names(check({name: text})) == {"file-duplicate-key"}
    read = {"ds.json": lambda: deepspeed_config.read(name, ""), "a.yaml": lambda: accelerate_config.read(name, "")}
    assert "stands twice" in mistake(read.get(name, lambda: flags.load(["--recipe", name])))


def test_a_pipelines_schedule_is_known_and_noted(check):
    ours = {"pp_size": 2, "pp_virtual_stages": 2, "pp_schedule": "interleaved1f1b"}
    mesh = {f"parallelism_config_{key}": value for key, value in {"tp_size": 2, **ours}.items()}
    found = check({"a.yaml": DDP | {"num_machines": 1, "parallelism_config": mesh}})
    assert names(found) == {"accelerate-own-key"}
    assert {one.at.rpartition("_config_")[2] for one in found.findings} == set(ours)


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
    of_zero = {key for key in options if key.startswith(("deepspeed_", "zero", "offload_", "gradient_"))}
    assert set(known["deepspeed_config"]) == of_zero - {"deepspeed_fields_from_accelerate_config"}  # the launcher's
    gone = {key for key, new in ARGUMENT_KEY_MAPPING.items() if isinstance(new, ConversionStatus)}
    assert set(known["fsdp1_only"]) == gone | {"fsdp_sharding_strategy"}
    assert version("accelerate").startswith("1.15")  # as the file says

"""A command line of train.py: what it takes, who wins, and what a mistake is told."""

import argparse
import importlib
import math
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from brigade.__main__ import VERBS, main
from brigade.errors import UserError
from brigade.recipe import flags
from brigade.recipe.batch import batch_arithmetic
from brigade.recipe.files import DEFAULT_RECIPE
from brigade.recipe.flags import OTHER_NAMES
from brigade.recipe.identity import identity
from brigade.recipe.schema import SECTION_OF, SECTIONS

ROOT = Path(__file__).parents[2]


# ---- what is taken -----------------------------------------------------------------------------------------------
def test_without_any_flag_the_default_recipe():
    settings = flags.load([])
    assert settings.recipe_path == DEFAULT_RECIPE and settings.name == "tiny-full" and settings.overridden == []
    assert settings.recipe.training.learning_rate == 3e-3


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*/*.yaml")), ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_recipe_loads(path):
    settings = flags.load(["--recipe", str(path)])
    assert settings.name == f"{path.parent.name}-{path.stem}"


def test_a_recipe_is_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert flags.load(["--recipe", "recipes/tiny/full.yaml"]).recipe_path == ROOT / "recipes/tiny/full.yaml"


@pytest.mark.parametrize("words", [["--max_steps", "3"], ["--max_steps=3"], ["--max-steps=3"], ["--max-steps", "3"]])
def test_spellings_of_a_flag(load, words):
    assert load(*words).recipe.training.max_steps == 3


@pytest.mark.parametrize("words, value", [
    (["--bf16"], True), (["--bf16", "true"], True), (["--bf16=True"], True), (["--bf16", "false"], False),
    (["--bf16=no"], False), ([], False),
])  # fmt: skip
def test_spellings_of_a_switch(load, words, value):
    assert load(*words).recipe.training.bf16 is value


def test_a_bare_switch_before_another_flag(load):
    training = load("--bf16", "--max_steps", "3").recipe.training
    assert training.bf16 is True and training.max_steps == 3


@pytest.mark.parametrize("number", ["1e-5", "1.0e-5", "0.00001", "1E-5"])
def test_numbers_in_any_notation(load, write_recipe, number):
    # YAML 1.1, which PyYAML reads, takes 1e-5 for a string.
    assert load("--learning_rate", number).recipe.training.learning_rate == 1e-5
    text = yaml.safe_dump(yaml.safe_load(write_recipe().read_text())).replace(
        "training:", f"training:\n  learning_rate: {number}"
    )
    assert flags.load(["--recipe", str(write_recipe(text))]).recipe.training.learning_rate == 1e-5


@pytest.mark.parametrize("flag", ["--ds_config", "--deepspeed", "--ds-config"])
def test_deepspeed_is_another_name_of_ds_config(load, flag):
    settings = load(flag, "ds_configs/zero3.json")
    assert settings.recipe.cluster.ds_config == "ds_configs/zero3.json"
    assert settings.sources["ds_config"].startswith("flag")


@pytest.mark.parametrize("word", ["--local_rank=3", "--local-rank=3"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_launchers_put_local_rank_anywhere(write_recipe, word, place):
    words = [f"--recipe={write_recipe()}", "--max_steps=3"]
    words.insert(place, word)
    settings = flags.load(words)
    assert settings.recipe.training.max_steps == 3 and settings.overridden == []


@pytest.mark.parametrize("key, text", [
    ("revision", "1234567"), ("revision", "1e5"), ("dataset_config_name", "2024"), ("model_name_or_path", "2024-01-01"),
    ("train_file", "2024-13-45"), ("revision", "yes"), ("model_name_or_path", "a: b"), ("model_name_or_path", "x #1"),
])  # fmt: skip
def test_names_are_text_however_they_look(load, key, text):
    # A commit of digits alone is a name: on a command line nobody can see that YAML would read a number.
    recipe = load(f"--{key}", text).recipe
    assert getattr(getattr(recipe, SECTION_OF[key]), key) == text


def test_null_takes_a_value_back(load):
    assert load("--save_steps", "null").recipe.training.save_steps is None
    settings = load("--dataset_name", "null", "--train_file", "mine.jsonl")
    assert settings.recipe.data.dataset_name is None and settings.recipe.data.train_file == "mine.jsonl"


def test_lists_and_tables_as_yaml(load):
    training = load("--report_to", "[wandb, tensorboard]", "--lr_scheduler_kwargs", "{num_cycles: 2}").recipe.training
    assert training.report_to == ["wandb", "tensorboard"] and training.lr_scheduler_kwargs == {"num_cycles": 2}
    assert load("--report_to", "[]").recipe.training.report_to == []
    for words in ("wandb,tensorboard", "wandb tensorboard", "wandb, tensorboard"):
        assert load("--report_to", words).recipe.training.report_to == ["wandb", "tensorboard"]
    assert load(training={"report_to": "wandb"}).recipe.training.report_to == ["wandb"]


def test_run_flags(load):
    settings = load("--output_dir", "there", "--fresh", "--rehearse", "--resume_from_checkpoint", "there/checkpoint-3")
    assert settings.output_dir == Path("there") and settings.fresh and settings.rehearse
    assert settings.resume_from_checkpoint == "there/checkpoint-3"


def _types(annotation):
    """All types within an annotation."""
    return {annotation}.union(*map(_types, get_args(annotation)))


def test_every_key_is_a_flag_with_help(capsys):
    with pytest.raises(SystemExit) as left:
        flags.load(["--help"])
    shown = capsys.readouterr().out
    assert "Undefined" not in shown and "The global batch that learning_rate was chosen for" in " ".join(shown.split())
    assert left.value.code == 0 and [key for key in SECTION_OF if f"--{key}" not in shown] == []


def test_help_of_a_verb_says_types_defaults_and_what_it_hands_on(capsys):
    shown = {}
    for verb in VERBS:
        with pytest.raises(SystemExit) as left:
            main([verb, "--help"])
        assert left.value.code == 0
        shown[verb] = " ".join(capsys.readouterr().out.split())
    assert "(number from 1, default: 300)" in shown["launch"] and "--max_steps" in shown["launch"]
    assert "(whole number from 0, default: 3)" in shown["eval"] and "--max_steps" not in shown["eval"]


# Which numbers make no sense: below where a flag begins, for each flag of a command that takes a number.
NUMBERS = {
    "plan": {"lora_r": "0", "max_length": "0", "global_batch_size": "0", "micro_batch": "-1", "margin": "1", "host_memory": "-5",
             "nvme": "0"},
    "eval": {"answers": "-1", "learned": "-0.2"}, "export": {"step": "0"},
    "launch": {"master_port": "65536", "start_timeout": "0", "restarts": "-1", "min_hosts": "0", "restart_pause": "-1",
               "silence": "1", "log_limit": "0"},
    "prepare": {}, "lint": {}, "attach": {}, "status": {},
}  # fmt: skip
ZERO_IS_ONE = {
    "lora_dropout",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "adam_beta1",
    "adam_beta2",
    "seed",
    "eval_answers",
    "dataloader_num_workers",
    "hang_timeout",
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_number_that_makes_no_sense_is_refused_by_every_command(verb, capsys):
    parser = argparse.ArgumentParser()
    importlib.import_module(f"brigade.commands.{VERBS[verb][0]}").add_arguments(parser)
    assert NUMBERS[verb].keys() == {action.dest for action in parser._actions if action.type not in (None, Path)}
    for flag, wrong in NUMBERS[verb].items():
        for value in (wrong, "nan", "much"):
            assert main([verb, f"--{flag}", value]) == 2
            said = capsys.readouterr().err
            assert f"error: flag --{flag}\n  {value!r} is not a" in said and "cure: give a" in said


NUMERIC = [
    key for key, section in SECTION_OF.items() if {int, float} & _types(SECTIONS[section].model_fields[key].annotation)
]


@pytest.mark.parametrize("key", NUMERIC)
def test_and_by_a_run(key, load, mistake):
    for value in ("-2", ".nan", *(["0"] if key not in ZERO_IS_ONE else [])):
        assert f"flag --{key}" in mistake(load, f"--{key}", value)


def test_no_key_stands_in_two_sections():
    assert len(SECTION_OF) == sum(len(model.model_fields) for model in SECTIONS.values())
    assert not set(OTHER_NAMES) & set(SECTION_OF)


# ---- who wins ----------------------------------------------------------------------------------------------------
def test_a_flag_wins_and_is_reported(load):
    settings = load("--learning_rate", "1e-4", "--weight_decay", "0.1", training={"learning_rate": 2e-5})
    assert settings.recipe.training.learning_rate == 1e-4
    assert settings.overridden == ["--learning_rate 1e-4 (the recipe says 2e-05)"]  # weight_decay is not in the recipe
    assert settings.place("learning_rate") == "flag --learning_rate"
    assert settings.place("max_steps").endswith("full.yaml: training.max_steps")


@pytest.mark.parametrize("inside, flag", [(0.003, "3e-3"), ("1e-5", "0.00001"), (True, "yes"), (1, "1.0")])
def test_the_same_value_in_other_words_overrides_nothing(load, inside, flag):
    key = "bf16" if inside is True else "learning_rate"
    assert load(f"--{key}", flag, training={key: inside}).overridden == []


def test_the_last_of_two_equal_flags_wins(load):
    assert load("--max_steps", "3", "--max_steps", "4").recipe.training.max_steps == 4


@pytest.mark.parametrize("pair", [("ds_config", "accelerate_config"), ("accelerate_config", "ds_config")])
def test_a_strategy_flag_replaces_the_recipes_strategy_and_says_so(load, pair):
    given, gone = pair
    settings = load(f"--{given}", "new.file", cluster={gone: "old.file"})
    assert getattr(settings.recipe.cluster, gone) is None and getattr(settings.recipe.cluster, given) == "new.file"
    assert len(settings.overridden) == 1
    assert f"--{given} new.file" in settings.overridden[0] and "old.file" in settings.overridden[0]


def test_two_strategy_flags_contradict(load, mistake):
    message = mistake(load, "--ds_config", "a.json", "--accelerate_config", "b.yaml")
    assert "--ds_config" in message and "--accelerate_config" in message


def test_learning_rate_scaling_is_against_the_recipes_own_batch(load):
    scaled = {"learning_rate": 1e-3, "learning_rate_scaling": "linear"}
    training = load("--global_batch_size", "64", training=scaled).recipe.training
    assert batch_arithmetic(training, 1, "").learning_rate == pytest.approx(2e-3)
    # run.yaml writes every key, so `reference_batch_size: null` stands there
    training = load("--global_batch_size", "64", training={**scaled, "reference_batch_size": None}).recipe.training
    assert batch_arithmetic(training, 1, "").learning_rate == pytest.approx(2e-3)
    training = load("--global_batch_size", "64", training={**scaled, "reference_batch_size": 16}).recipe.training
    assert batch_arithmetic(training, 1, "").learning_rate == pytest.approx(4e-3)
    settings = load("--global_batch_size", "64", "--reference_batch_size", "128", training=scaled)
    assert batch_arithmetic(settings.recipe.training, 1, "").learning_rate == pytest.approx(5e-4)
    assert settings.overridden == ["--global_batch_size 64 (the recipe says 32)"]


@pytest.mark.parametrize(
    "key, value", [("global_batch_size", 32), ("learning_rate", 2e-5), ("bf16", False), ("seed", 42)]
)
def test_a_flag_that_says_what_the_recipe_says_is_the_same_run(load, key, value):
    # `train.py --global_batch_size 32` continues what `train.py` began.
    assert identity(load(f"--{key}", str(value)).recipe, "s") == identity(load().recipe, "s")


# ---- run.yaml ----------------------------------------------------------------------------------------------------
def test_a_runs_own_record_repeats_it(load, tmp_path):
    first = load("--global_batch_size", "64", "--learning_rate", "1e-4", training={"learning_rate_scaling": "sqrt"})
    record = tmp_path / "outputs" / "tiny-full-ddp" / "run.yaml"
    record.parent.mkdir(parents=True)
    document = {**first.recipe.model_dump(mode="json"), "run": {"identity": "x", "hosts": ["a"], "anything": 1}}
    record.write_text(yaml.safe_dump(document))
    again = flags.load(["--recipe", str(record)])
    assert again.recipe == first.recipe and again.name == "tiny-full-ddp"


# ---- mistakes ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("section, wrong, right", [
    ("training", "learning_rat", "learning_rate"), ("training", "max_step", "max_steps"),
    ("training", "global_batchsize", "global_batch_size"), ("model", "model_name", "model_name_or_path"),
    ("data", "dataset_names", "dataset_name"), ("cluster", "hostfiles", "hostfile"),
])  # fmt: skip
def test_an_unknown_key_suggests_the_nearest(load, mistake, section, wrong, right):
    message = mistake(load, **{section: {wrong: "abc"}})
    assert f"full.yaml: {section}.{wrong}" in message and "'abc'" in message and repr(right) in message.splitlines()[-1]
    message = mistake(load, f"--{wrong}", "abc")
    assert f"flag --{wrong}" in message and repr(right) in message.splitlines()[-1]


@pytest.mark.parametrize("key, wrong, home", [
    ("max_length", "training", "data"), ("learning_rate", "model", "training"), ("ds_config", "training", "cluster"),
])  # fmt: skip
def test_a_key_in_the_wrong_section_is_told_its_home(load, mistake, key, wrong, home):
    message = mistake(load, **{wrong: {key: 1}})
    assert f"{wrong}.{key}" in message and f"under {home}:" in message.splitlines()[-1]


def test_a_key_outside_all_sections_is_told_its_home(write_recipe, mistake):
    path = write_recipe(write_recipe().read_text() + "learning_rate: 1\n")
    message = mistake(flags.load, ["--recipe", str(path)])
    assert "learning_rate" in message and "under training:" in message


def test_an_unknown_section_suggests_the_nearest(write_recipe, mistake):
    path = write_recipe(write_recipe().read_text().replace("training:", "trainin:"))
    assert "'training'" in mistake(flags.load, ["--recipe", str(path)]).splitlines()[-1]


@pytest.mark.parametrize("old", OTHER_NAMES)
def test_old_names_get_advice(load, write_recipe, mistake, old):
    advice = OTHER_NAMES[old]
    assert advice in mistake(load, f"--{old}", "1")
    assert advice in mistake(load, training={old: 1})
    if old not in SECTIONS:
        path = write_recipe(write_recipe().read_text() + f"{old}: 1\n")
        assert advice in mistake(flags.load, ["--recipe", str(path)])


def test_advice_names_keys_that_exist():
    # The names that an advice tells people to set, so that a renamed key does not leave it behind.
    import re

    for old, advice in OTHER_NAMES.items():
        named = set(re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)+", advice)) - {"accelerate_configs", "fsdp2_1x2"}
        assert named <= set(SECTION_OF), old


@pytest.mark.parametrize("section, key, value, wanted", [
    ("training", "max_steps", "many", "integer"), ("training", "learning_rate", "fast", "number"),
    ("training", "bf16", "maybe", "bool"), ("training", "global_batch_size", 0, "greater than or equal to 1"),
    ("training", "optim", "adam", "adamw_torch"), ("training", "report_to", "wandbb", "'wandb'"),
    ("training", "learning_rate", -1.0, "greater than 0"), ("model", "attn_implementation", "flash", "sdpa"),
    ("data", "max_length", 2.5, "integer"), ("training", "learning_rate", math.inf, "finite"),
    ("training", "max_steps", True, "integer"), ("training", "adam_beta2", 1, "less than 1"),
    ("training", "max_steps", 0, " a number of steps from 1, or -1"), ("training", "seed", 2**64, "less than 4294967296"),
    ("training", "global_batch_size", 10**11, "less than or equal to 1000000"),
    ("training", "global_batch_size", 16.5, " an integer"),
    ("training", "per_device_train_batch_size", 16.5, " an integer or 'auto'"),
    ("training", "optim_args", "foo", "name=value,name=value"),
])  # fmt: skip
def test_a_wrong_value_names_place_value_and_what_is_wanted(load, mistake, section, key, value, wanted):
    message = mistake(load, **{section: {key: value}})
    place, problem, cure = message.splitlines()
    assert place.endswith(f"full.yaml: {section}.{key}") and repr(value) in problem
    assert wanted in problem and wanted in cure and "error" not in problem and "got" not in problem
    place, problem, cure = mistake(load, f"--{key}", str(value)).splitlines()
    assert place == f"error: flag --{key}" and wanted in problem and wanted in cure


def test_a_long_value_is_cut(load, mistake):
    message = mistake(load, training={"max_steps": "x" * 5000})
    assert "xxx" in message and len(message) < 1000


def test_a_missing_key_is_named(load, write_recipe, mistake):
    path = write_recipe("model: {model_name_or_path: m}\ndata: {train_file: d}\ntraining: {max_steps: 3}\n")
    assert "training.global_batch_size" in mistake(flags.load, ["--recipe", str(path)])
    path = write_recipe("model: {model_name_or_path: m}\ntraining: {global_batch_size: 3}\n")
    message = mistake(flags.load, ["--recipe", str(path)])
    assert "data" in message and "missing" in message


@pytest.mark.parametrize("text, line", [
    ("model:\n  a: [1, 2\ndata:\n", 3), ("model:\n\tname: x\n", 2), ("model: a: b\n", 1), ("training:\n  x: 'a\n", 3),
    ("model: x\n- y\n", 2), ("a: &x 1\nb: *y\n", 2), ("a: !!python/object:os.system {}\n", 1),
    ("a: 1\n? [x]\n: 2\n", 2),
])  # fmt: skip
def test_a_yaml_error_names_its_line(write_recipe, mistake, text, line):
    path = write_recipe(text)
    assert f"{path}, line {line}" in mistake(flags.load, ["--recipe", str(path)]).splitlines()[0]


@pytest.mark.parametrize("text, said", [
    ("- a\n- b\n", "a list"), ("just words\n", "a single value"), ("", "empty"), ("42\n", "a single value"),
    ("model: {model_name_or_path: m}\ndata:\n", "data\n  it is empty"),
    ("model: {model_name_or_path: null}\ndata: {}\n", "null is not a string"),
])  # fmt: skip
def test_a_file_or_a_section_that_holds_nothing_of_ours(write_recipe, mistake, text, said):
    path = write_recipe(text)
    message = mistake(flags.load, ["--recipe", str(path)])
    assert str(path) in message and said in message and "None" not in message


@pytest.mark.parametrize("text, line, words", [
    ("model: {model_name_or_path: m}\ndata: {train_file: a}\ndata: {max_length: 9}\n", 3, ["'data'", "line 2"]),
    ("training:\n  seed: 1\n  bf16: true\n  seed: 2\n", 4, ["'seed'", "line 2"]),
    ("data: {columns: {text: a, text: b}}\n", 1, ["'text'"]),
])  # fmt: skip
def test_a_key_that_stands_twice_is_refused(write_recipe, mistake, text, line, words):
    path = write_recipe(text)
    message = mistake(flags.load, ["--recipe", str(path)])
    assert message.startswith(f"error: {path}, line {line}\n") and all(word in message for word in words)


def test_a_date_that_is_none(write_recipe, mistake):
    path = write_recipe("model: {revision: 2024-13-45}\n")
    assert str(path) in mistake(flags.load, ["--recipe", str(path)])


@pytest.mark.parametrize("words, said", [
    (["--recipe", "recipes/tiny"], "full.yaml"), (["--recipe", "recipes/nowhere.yaml"], "'recipes/nowhere.yaml'"),
    (["--recipe", "recipes/nowhere.yaml"], str(ROOT)), (["--recipe", "docs"], "a directory"),
    (["full.yaml"], "'full.yaml'"), (["--max_steps"], "max_steps"), (["-x"], "-x"),
    (["--recipe", "~nobody-here/x.yaml"], "~nobody"),
    (["--recipe", "x" * 300], "xxx"),
])  # fmt: skip
def test_words_that_lead_nowhere(mistake, words, said):
    assert said in mistake(flags.load, words)


def test_flags_are_not_abbreviated(load, mistake):
    assert "'learning_rate'" in mistake(load, "--learning", "1e-5") or "there is no such flag" in mistake(
        load, "--learning", "1"
    )


# ---- anything at all ---------------------------------------------------------------------------------------------
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 10**6)
    | st.floats()
    | st.text(max_size=12)
    | st.dates()
    | st.sampled_from(["auto", "none", "1e-5", "yes", "recipes/tiny", "python-docs"])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3), max_leaves=6
)
keys = st.sampled_from([*SECTION_OF, *OTHER_NAMES, "nonsense"]) | scalars
sections = st.dictionaries(keys, values, max_size=4) | values
documents = st.dictionaries(st.sampled_from([*SECTIONS, "run", "modle", "lr"]) | scalars, sections, max_size=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("recipes")


def load_or_told(words):
    """The settings, if load gives any; a UserError of at most four lines is the only other way out."""
    try:
        settings = flags.load(words)
    except UserError as error:
        assert 3 <= len(str(error).splitlines()) <= 4
        return None
    identity(settings.recipe, "s")
    with suppress(UserError):
        batch_arithmetic(settings.recipe.training, 2, "place")
    return settings


@given(documents)
def test_any_document_is_a_recipe_or_a_users_mistake(folder, document):
    path = folder / "document.yaml"
    path.write_text(yaml.safe_dump(document))
    load_or_told(["--recipe", str(path)])


@given(
    st.fixed_dictionaries(
        {"model": st.just({"model_name_or_path": "m"}), "data": st.just({"train_file": "f"})},
        optional={
            "training": st.fixed_dictionaries(
                {"global_batch_size": st.integers(1, 64)},
                optional={key: values for key in SECTIONS["training"].model_fields if key != "global_batch_size"},
            )
        },
    )
)
def test_any_values_of_known_keys(folder, document):
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(document))
    load_or_told(["--recipe", str(path)])


@given(st.binary(max_size=80) | st.text(alphabet="ab:-[]{}#&*!|>'\"%@`?, \n\t0x_.1", max_size=60))
def test_any_file_is_a_recipe_or_a_users_mistake(folder, content):
    path = folder / "any.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    load_or_told(["--recipe", str(path)])


words = st.sampled_from(
    [f"--{key}" for key in SECTION_OF] + ["--fresh", "--local_rank=1", "--output_dir", "--lr", "-h1"]
)


@given(
    st.lists(
        st.tuples(words, scalars.map(str) | values.map(str)).map(list) | st.text(max_size=8).map(lambda w: [w]),
        max_size=4,
    )
)
def test_any_command_line_is_taken_or_a_users_mistake(argv):
    load_or_told([word for pair in argv for word in pair if word not in ("-h", "--help")])

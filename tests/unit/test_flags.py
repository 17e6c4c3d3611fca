"""A command line of train.py: what it takes, and who wins."""

import argparse
import importlib
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from brigade.__main__ import VERBS, main
from brigade.train.recipe import flags, help_text
from brigade.train.recipe.batch import batch_arithmetic
from brigade.train.recipe.files import DEFAULT_RECIPE, read_yaml
from brigade.train.recipe.mistakes import OTHER_NAMES
from brigade.train.recipe.schema import SECTION_OF, SECTIONS

ROOT = Path(__file__).parents[2]


# ---- what is taken -----------------------------------------------------------------------------------------------
def test_without_any_flag_the_default_recipe():
    settings = flags.load([])
    assert settings.recipe_path == DEFAULT_RECIPE and settings.name == "tiny-full" and not settings.overridden
    assert settings.recipe.training.learning_rate == 3e-3


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
    assert settings.recipe.training.max_steps == 3 and not settings.overridden


@pytest.mark.parametrize("key, text", [
    ("revision", "1234567"), ("revision", "1e5"), ("dataset_config_name", "2024"), ("model_name_or_path", "2024-01-01"),
    ("train_file", "2024-13-45"), ("revision", "yes"), ("model_name_or_path", "a: b"), ("model_name_or_path", "x #1"),
])  # fmt: skip
def test_names_are_text_however_they_look(load, key, text):
    # A commit of digits alone is a name: on a command line nobody can see that YAML would read a number.
    recipe = load(f"--{key}", text).recipe
    assert getattr(getattr(recipe, SECTION_OF[key]), key) == text


@pytest.mark.parametrize("key, word, value", [
    ("save_steps", "none", None), ("max_train_samples", "None", None), ("tokenizer_name_or_path", "none", None),
    ("ds_config", "none", None), ("ddp_comm_hook", "null", "none"), ("report_to", "null", []), ("report_to", "none", []),
    ("chat_template", "none", "none"), ("chat_template", "null", None),  # the one key that tells them apart
])  # fmt: skip
def test_none_and_null_are_one(load, write_recipe, key, word, value):
    assert getattr(getattr(load(f"--{key}", word).recipe, SECTION_OF[key]), key) == value
    written = flags.load(["--recipe", str(write_recipe(**{SECTION_OF[key]: {key: yaml.safe_load(word)}}))])
    assert getattr(getattr(written.recipe, SECTION_OF[key]), key) == value


def test_lists_and_tables_as_yaml(load):
    training = load("--report_to", "[wandb, tensorboard]", "--lr_scheduler_kwargs", "{num_cycles: 2}").recipe.training
    assert training.report_to == ["wandb", "tensorboard"] and training.lr_scheduler_kwargs == {"num_cycles": 2}
    assert load("--report_to", "[]").recipe.training.report_to == []
    for words in ("wandb,tensorboard", "wandb tensorboard", "wandb, tensorboard"):
        assert load("--report_to", words).recipe.training.report_to == ["wandb", "tensorboard"]
    assert load(training={"report_to": "wandb"}).recipe.training.report_to == ["wandb"]
    assert load("--report_to", "none").recipe.training.report_to == []  # as in Transformers
    assert load(training={"report_to": ["none"]}).recipe.training.report_to == []


def test_run_flags(load):
    settings = load("--output_dir", "there", "--fresh", "--rehearse", "--resume_from_checkpoint", "there/checkpoint-3")
    assert settings.output_dir == Path("there") and settings.fresh and settings.rehearse
    assert settings.resume_from_checkpoint == "there/checkpoint-3"


def _types(annotation):
    """All types within an annotation."""
    return {annotation}.union(*map(_types, get_args(annotation)))


@pytest.fixture
def helped(capsys):
    """helped(*words): what a command line of train.py prints that asks for help."""

    def call(*words):
        with pytest.raises(SystemExit) as left:
            flags.load([*words])
        assert left.value.code == 0
        return capsys.readouterr().out

    return call


def test_every_key_is_a_flag_with_help(helped):
    shown = helped("--help", "all")
    assert "Undefined" not in shown and "The global batch that learning_rate was chosen for" in " ".join(shown.split())
    assert [key for key in SECTION_OF if f"--{key}" not in shown] == []


def test_a_rehearsal_makes_nothing_ready_for_a_run(mistake):
    assert "leave --rehearse or --prepare out" in mistake(flags.load, ["--rehearse", "--prepare"], "flag --prepare")


def test_help_begins_with_what_most_runs_set_and_leads_to_the_rest(helped, mistake, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def keys(*words):
        return set(re.findall(r"^  --(\w+)", helped(*words), re.MULTILINE))

    most = set(read_yaml(help_text.MOST_SET))
    of_a_run = {"recipe", "output_dir", "resume_from_checkpoint", "fresh", "rehearse", "prepare", "allow_code"}
    assert keys("--help") - most == of_a_run
    short = helped("-h", "--learning_rate", "1e-5")
    assert most <= keys("-h") and len(short.splitlines()) < 100 and help_text.POINTER in " ".join(short.split())
    for section, model in SECTIONS.items():
        assert keys("--help", section) == keys(f"--help={section}") == set(model.model_fields), section
    assert keys("--help", "lora_r") == {"lora_r"} and "2106.09685" in helped("--help", "lora_r")
    assert "did you mean 'training'" in mistake(flags.load, ["--help", "trainin"])


def test_help_of_a_verb_says_types_defaults_and_what_it_hands_on(capsys):
    shown = {}
    for verb in VERBS:
        with pytest.raises(SystemExit) as left:
            main([verb, "--help"])
        assert left.value.code == 0
        shown[verb] = " ".join(capsys.readouterr().out.split())
    assert "(number from 1, default: 300)" in shown["launch"]
    for verb in ("launch", "prepare", "check"):
        assert help_text.POINTER in shown[verb] and "--max_steps" not in shown[verb]
    assert "(whole number from 0, default: 3)" in shown["eval"] and "--max_steps" not in shown["eval"]


# Which numbers make no sense: below where a flag begins, for each flag of a command that takes a number.
NUMBERS = {
    "plan": {"lora_r": "0", "max_length": "0", "global_batch_size": "0", "micro_batch": "-1", "margin": "1", "host_memory": "-5",
             "nvme": "0", "price": "-1", "tokens": "1e14", "deadline": "0",
             "sync_every": "0", "images_per_sample": "-1"},
    "eval": {"answers": "-1", "exact": "2", "limit": "0", "batch_size": "0"}, "export": {"step": "0"},
    "chat": {"step": "0", "max_new_tokens": "0", "temperature": "-0.1"},
    "launch": {"master_port": "65536", "start_timeout": "0", "restarts": "-1", "min_hosts": "0", "restart_pause": "-1",
               "silence": "1", "log_limit": "0"},
    "prepare": {}, "lint": {}, "attach": {}, "status": {}, "check": {}, "report": {}, "top": {"every": "0.1"},
    "kernels": {"seconds": "0"},
}  # fmt: skip
ZERO_IS_ONE = {
    "lora_dropout", "trainable_token_indices", "warmup_steps", "weight_decay", "max_grad_norm",
    "router_aux_loss_coef", "router_bias_update_rate", "label_smoothing", "label_smoothing_factor", "z_loss_coef",
    "simpo_gamma", "adam_beta1", "adam_beta2", "seed", "eval_answers", "dataloader_num_workers", "hang_timeout",
    "outer_momentum", "tiled_loss",
}  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_a_number_that_makes_no_sense_is_refused_by_every_command(verb, prints):
    parser = argparse.ArgumentParser()
    importlib.import_module(f"brigade.{VERBS[verb][0]}").add_arguments(parser)
    assert NUMBERS[verb].keys() == {action.dest for action in parser._actions if action.type not in (None, Path)}
    for flag, wrong in NUMBERS[verb].items():
        for value in (wrong, "nan", "much"):
            said = prints(2, verb, f"--{flag}", value)
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
    assert settings.overridden == ("--learning_rate 1e-4 (the recipe says 2e-05)",)  # weight_decay is not in the recipe
    assert settings.place("learning_rate") == "flag --learning_rate"
    assert settings.place("max_steps").endswith("full.yaml: training.max_steps")


@pytest.mark.parametrize("key, inside, flag", [
    ("learning_rate", 0.003, "3e-3"), ("learning_rate", "1e-5", "0.00001"), ("learning_rate", 1, "1.0"), ("bf16", True, "yes"),
    ("global_batch_size", 32, "32"), ("seed", 42, "42"),
])  # fmt: skip
def test_the_same_value_in_other_words_overrides_nothing_and_is_the_same_run(load, key, inside, flag):
    named, written = load(f"--{key}", flag, training={key: inside}), load(training={key: inside})
    assert not named.overridden and named.recipe == written.recipe


def test_the_last_of_two_equal_flags_wins(load):
    assert load("--max_steps", "3", "--max_steps", "4").recipe.training.max_steps == 4


@pytest.mark.parametrize("words, training, said", [
    (("--num_train_epochs", "3", "--max_steps", "4"), {}, "--num_train_epochs 3 has no effect: --max_steps 4"),
    ((), {"num_train_epochs": 2, "max_steps": 4}, "the recipe's num_train_epochs 2 has no effect"),
    (("--max_steps", "4"), {"num_train_epochs": 2}, "the recipe's num_train_epochs 2 has no effect: --max_steps 4"),
    ((), {"num_train_epochs": 1, "max_steps": 4}, ""),  # the default, which run.yaml writes out
    (("--num_train_epochs", "3", "--max_steps", "-1"), {"max_steps": 4}, "--max_steps -1 (the recipe says 4)"),
    (("--num_train_epochs", "3"), {}, ""),
])  # fmt: skip
def test_epochs_beside_steps_are_said_to_have_no_effect(load, words, training, said):
    assert said in "\n".join(load(*words, training=training).overridden)
    assert said or not load(*words, training=training).overridden


def test_a_flag_that_the_recipe_makes_void_is_refused(load, mistake):
    message = mistake(load, "--num_train_epochs", "3", training={"max_steps": 4})
    assert message.splitlines()[0].endswith("flag --num_train_epochs") and "--max_steps -1" in message


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
    # run.yaml writes every key, so `reference_batch_size: null` stands there
    for own, rate in (({}, 2e-3), ({"reference_batch_size": None}, 2e-3), ({"reference_batch_size": 16}, 4e-3)):
        training = load("--global_batch_size", "64", training=scaled | own).recipe.training
        assert batch_arithmetic(training, 1, "").learning_rate == pytest.approx(rate)
    settings = load("--global_batch_size", "64", "--reference_batch_size", "128", training=scaled)
    assert batch_arithmetic(settings.recipe.training, 1, "").learning_rate == pytest.approx(5e-4)
    assert settings.overridden == ("--global_batch_size 64 (the recipe says 32)",)


# ---- run.yaml ----------------------------------------------------------------------------------------------------
def test_a_runs_own_record_repeats_it(load, tmp_path):
    first = load("--global_batch_size", "64", "--learning_rate", "1e-4", training={"learning_rate_scaling": "sqrt"})
    record = tmp_path / "outputs" / "tiny-full-ddp" / "run.yaml"
    record.parent.mkdir(parents=True)
    document = {**first.recipe.model_dump(mode="json"), "run": {"identity": "x", "hosts": ["a"], "anything": 1}}
    record.write_text(yaml.safe_dump(document))
    again = flags.load(["--recipe", str(record)])
    assert again.recipe == first.recipe and again.name == "tiny-full-ddp"


def test_without_a_verb_all_of_them_are_shown(prints):
    shown = prints(0)
    assert all(f"    {verb} " in shown for verb in VERBS) and "python train.py" in shown


@pytest.mark.parametrize("words, said", [
    (["prepare"], "no recipe is named"), (["launch"], "no recipe is named"), (["attach"], "no directory is named"),
    (["eval"], "no output is named"), (["chat"], "no output is named"), (["export", "outputs/a"], "no DEST is named"),
    (["report"], "no OUTPUT is named"),
    (["launch", "a.yaml", "--hostfile"], "flag --hostfile\n  expected one argument"),
    (["launch", "a.yaml", "--write", "pbs"], "flag --write\n  invalid choice: 'pbs'"),
    (["status", "nope"], "there is no such directory"), (["eval", "nope"], "there is no such directory"),
    (["chat", "nope"], "there is no such directory"),
    (["export", "nope", "x"], "there is no such directory"),
])  # fmt: skip
def test_a_word_that_is_missing_or_names_nothing(prints, words, said):
    told = prints(2, *words)
    assert told.startswith("error: ") and said in told and "cure: " in told and "usage" not in told


@pytest.mark.parametrize("word, cure", [("lunch", "'launch'"), ("train", "python train.py"), ("-x", "use one of")])
def test_a_mistyped_verb_is_answered_with_one_that_exists(prints, word, cure):
    assert repr(word) in (said := prints(2, word, "x")) and cure in said.splitlines()[-1]

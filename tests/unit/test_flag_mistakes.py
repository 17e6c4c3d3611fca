"""Mistakes in flags and recipes: each is told with its place, its value and a cure, whatever is written there."""

import dataclasses
import math
import re
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainingArguments

from brigade.errors import UserError
from brigade.errors.tables import table
from brigade.train.recipe import flags
from brigade.train.recipe.batch import batch_arithmetic
from brigade.train.recipe.mistakes import ONLY_FLAGS, OTHER_NAMES, UNSUPPORTED, unknown_flag, unknown_sections
from brigade.train.recipe.schema import SECTION_OF, SECTIONS, identity

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "brigade/train/recipe"


@pytest.fixture
def refused(write_recipe, mistake):
    """refused(text): what is said of a recipe with this text."""
    return lambda text: mistake(flags.load, ["--recipe", str(write_recipe(text))])


@pytest.mark.parametrize("section, wrong, right", [
    ("training", "learning_rat", "learning_rate"), ("training", "max_step", "max_steps"),
    ("training", "global_batchsize", "global_batch_size"), ("model", "model_name_or", "model_name_or_path"),
    ("data", "dataset_names", "dataset_name"), ("cluster", "hostfiles", "hostfile"),
])  # fmt: skip
def test_an_unknown_key_suggests_the_nearest(load, mistake, section, wrong, right):
    message = mistake(load, **{section: {wrong: "abc"}})
    assert f"full.yaml: {section}.{wrong}" in message and "'abc'" in message and repr(right) in message.splitlines()[-1]
    message = mistake(load, f"--{wrong}", "abc")
    assert f"flag --{wrong}" in message and repr(right) in message.splitlines()[-1]


@pytest.mark.parametrize("written, reads", [
    ("no", "YAML reads no, off and false as false"), ("on", 'as "yes": YAML reads yes, on'), ("2024", '"2024"'),
    ("2024-05-01", 'quote it: "2024-05-01"'),
])  # fmt: skip
def test_a_word_that_yaml_takes_for_something_else(refused, written, reads):
    model = "model: {model_name_or_path: m}\n"
    message = refused(f"data:\n  dataset_config_name: {written}\n{model}")
    assert "data.dataset_config_name" in message and "quote it" in message and reads in message.splitlines()[-1]
    assert reads in refused(f"data:\n  columns: {{text: {written}}}\n{model}")


@pytest.mark.parametrize("key, said", [
    ("packing_strategy", "set packing: true"), ("train_on_eos", "the end of each learned answer"), ("eos_token", "use one of"),
    ("sampling_strategy", "use one of"),
])  # fmt: skip
def test_a_name_that_shares_letters_only_is_not_suggested(load, mistake, key, said):
    message = mistake(load, f"--{key}", "x")
    assert said in message.splitlines()[-1] and "did you mean" not in message


def test_a_column_is_named_once(load, mistake):
    twice = ({"prompt": "q", "completion": "q"}, {"prompt": "q", "ignore": ["x", "q"]}, {"text": "q", "ignore": "q"})
    for columns in twice:
        message = mistake(load, data={"columns": columns})
        assert "data.columns" in message and "'q' stands for two" in message
    load(data={"columns": {"prompt": "q", "completion": "a", "ignore": ["x", "x"]}})


@pytest.mark.parametrize("key, wrong, home", [
    ("max_length", "training", "data"), ("learning_rate", "model", "training"), ("ds_config", "training", "cluster"),
])  # fmt: skip
def test_a_key_in_the_wrong_section_is_told_its_home(load, mistake, key, wrong, home):
    message = mistake(load, **{wrong: {key: 1}})
    assert f"{wrong}.{key}" in message and f"under {home}:" in message.splitlines()[-1]


def test_a_key_outside_all_sections_is_told_its_home_and_an_unknown_section_the_nearest(write_recipe, refused):
    message = refused(write_recipe().read_text() + "learning_rate: 1\n")
    assert "learning_rate" in message and "under training:" in message
    assert "'training'" in refused(write_recipe().read_text().replace("training:", "trainin:")).splitlines()[-1]


def test_names_of_other_tools_get_advice(load, mistake):
    known = flags.names_of(flags.parser())
    for old, advice in OTHER_NAMES.items():
        said = "Transformers' Trainer takes it, and Brigade does not" if old in UNSUPPORTED else "there is no such"
        messages = [str(unknown_flag(f"--{old}=1", known)), str(unknown_sections(Path("full.yaml"), [old]))]
        if old in ("lora_rank", "model", "warmup_ratio", "do_train"):
            messages += [mistake(load, f"--{old}", "1"), mistake(load, training={old: 1})]
        for message in messages:
            assert advice in message and said in message and old in message


@pytest.mark.parametrize("word, answer", [
    ("--lora_rank=8", "lora_r here"), ("--lora-rank", "lora_r here"), ("--rope_scaling", "rope_parameters here"),
    ("--cutoff_len", "max_length here"), ("--micro_batch_size", "per_device_train_batch_size here"),
    ("--gamma_beta_ratio", "simpo_gamma to beta times it"), ("--rpo_alpha", "write your own"),
    ("--flash_attn", "attn_implementation here"), ("--output", "output_dir here"), ("--local_ran", "use one of"),
])  # fmt: skip
def test_a_flag_of_another_tool(mistake, word, answer):
    assert answer in mistake(flags.load, [word, "1"]).splitlines()[-1]


@pytest.mark.parametrize("key, answer", [
    ("output_dir", "--output_dir"), ("fresh", "--fresh"), ("deepspeed", "ds_config"),
])  # fmt: skip
def test_a_flag_among_the_keys_of_a_recipe(load, mistake, key, answer):
    assert answer in mistake(load, training={key: 1}).splitlines()[-1]


def test_every_argument_of_transformers_is_a_key_or_has_advice():
    arguments = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    ours = {action.dest for action in flags.parser()._actions} | {"deepspeed"}
    assert arguments <= {*ours, *OTHER_NAMES}
    groups = table(RECIPE / "other_names.yaml")["unsupported"]
    former = {"no_cuda", "group_by_length", "include_tokens_per_second", "gradient_checkpointing_kwargs"}
    assert {name for group in groups for name in group["names"]} <= arguments | former
    assert {*ONLY_FLAGS} == ours - {*SECTION_OF} - {"help", "local_rank", "deepspeed"}


def test_advice_names_keys_that_exist():
    # The names that an advice tells people to set, so that a renamed key does not leave it behind.
    known = {*SECTION_OF, *ONLY_FLAGS, "cosine_with_min_lr", "min_lr", "min_lr_rate"}
    known |= {"nproc_per_node", "num_gpus", "master_port"}  # of launchers
    for old, advice in OTHER_NAMES.items():
        named = set(re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)+", advice)) - {"accelerate_configs", "fsdp2_1x2", "ds_configs"}
        assert named <= known, old


def test_names_to_choose_from_are_listed_once(load, mistake):
    message = mistake(load, training={"optim": "sophia"})
    assert message.count("'adamw_torch'") == 1 and "cure: give one of them" in message


@pytest.mark.parametrize("section, key, value, wanted", [
    ("training", "max_steps", "many", "integer"), ("training", "learning_rate", "fast", "number"),
    ("training", "bf16", "maybe", "true or false"), ("training", "global_batch_size", 0, "greater than or equal to 1"),
    ("training", "optim", "adamw_torhc", "'adamw_torch'"),
    ("training", "optim", "adamw", "'adamw_torch'"), ("training", "report_to", "wandbb", "'wandb'"),
    ("training", "learning_rate", -1.0, "greater than 0"), ("model", "attn_implementation", "flash", "'flash_attention_2'"),
    ("data", "max_length", 2.5, "integer"), ("training", "learning_rate", math.inf, "finite"),
    ("training", "max_steps", True, "integer"), ("training", "adam_beta2", 1, "less than 1"),
    ("training", "max_steps", 0, " a number of steps from 1, or -1"), ("training", "seed", 2**64, "less than 4294967296"),
    ("training", "global_batch_size", 10**11, "less than or equal to 1000000"),
    ("training", "global_batch_size", 16.5, " an integer"),
    ("training", "per_device_train_batch_size", 16.5, " an integer or 'auto'"),
    ("training", "optim_args", "foo", "name=value,name=value"),
    ("training", "optim_args", "momentum=0.9,nesterov=true,momentum=0.1", "each name once"),
    ("training", "warmup_steps", 1.5, "a whole number of steps, or below 1 a share of all steps"),
    ("model", "trainable_token_indices", [True, False], "without quotation marks YAML reads yes and no"),
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


def test_a_missing_key_is_named(refused):
    text = "model: {model_name_or_path: m}\ndata: {train_file: d}\ntraining: {max_steps: 3}\n"
    assert "training.global_batch_size" in refused(text)
    message = refused("model: {model_name_or_path: m}\ntraining: {global_batch_size: 3}\n")
    assert "data" in message and "missing" in message
    message = refused(text.replace("max_steps", "globalbatch_size"))  # and not as missing alone
    assert "globalbatch_size" in message and "did you mean 'global_batch_size'?" in message


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
    ("model: {revision: 2024-13-45}\n", "month must be in 1..12"),
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


@pytest.mark.parametrize("words, said", [
    (["--recipe", "recipes/tiny"], "full.yaml"), (["--recipe", "recipes/nowhere.yaml"], "'recipes/nowhere.yaml'"),
    (["--recipe", "recipes/nowhere.yaml"], str(ROOT)), (["--recipe", "docs"], "a directory"),
    (["full.yaml"], "'full.yaml'"), (["recipes/tiny/full.yaml"], "write --recipe recipes/tiny/full.yaml"),
    (["--recipe", "recipes/tiny/ful.yaml"], "did you mean recipes/tiny/full.yaml?"),
    (["--recipe", "qwen3-8b"], "did you mean recipes/qwen3-8b/full.yaml?"),
    (["--rope_parameters", "{rope_type: yarn}"], "original_max_position_embeddings: TOKENS"),
 (["--max_steps"], "max_steps"), (["-x"], "-x"),
    (["--recipe", "~nobody-here/x.yaml"], "~nobody"), (["--columns", "{mesages: a}"], "did you mean 'messages'?"),
    (["--datasets", "[{train_file: a}, {train_file: b, weigth: 1}]"], "datasets.1.weigth"),
    (["--recipe", "x" * 300], "xxx"),
])  # fmt: skip
def test_words_that_lead_nowhere(mistake, words, said):
    assert said in mistake(flags.load, words)


def test_flags_are_not_abbreviated(load, mistake):
    message = mistake(load, "--learning", "1e-5")
    assert "'learning_rate'" in message or "there is no such flag" in message


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


ALWAYS = {"model": st.just({"model_name_or_path": "m"}), "data": st.just({"train_file": "f"})}
SIZE = {"global_batch_size": st.integers(1, 64)}
TRAINING = {key: values for key in SECTIONS["training"].model_fields if key not in SIZE}


@given(st.fixed_dictionaries(ALWAYS, optional={"training": st.fixed_dictionaries(SIZE, optional=TRAINING)}))
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
    [*(f"--{key}" for key in SECTION_OF), "--fresh", "--local_rank=1", "--output_dir", "--lr", "-h1"]
)
pairs = st.tuples(words, scalars.map(str) | values.map(str)).map(list)


@given(st.lists(pairs | st.text(max_size=8).map(lambda word: [word]), max_size=4))
def test_any_command_line_is_taken_or_a_users_mistake(argv):
    load_or_told([word for pair in argv for word in pair if word not in ("-h", "--help")])

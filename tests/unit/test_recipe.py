"""The arithmetic of a step and the identity of a run."""

import json
import re
import shlex
import sys
import types
import typing

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from brigade.errors import UserError, did_you_mean, nearest
from brigade.lint.together import without_filler
from brigade.train.recipe import flags
from brigade.train.recipe.batch import batch_arithmetic
from brigade.train.recipe.data_section import WeightedSource
from brigade.train.recipe.schema import BEFORE, SECTION_OF, SECTIONS, Recipe, computed, identity
from brigade.train.recipe.training_section import TrainingSection
from testing.command_line import run_here

counts = st.integers(1, 300)
micros = st.just("auto") | st.integers(1, 40)


def training(size, micro="auto", **more):
    return TrainingSection(global_batch_size=size, per_device_train_batch_size=micro, **more)


# ---- a step's arithmetic -----------------------------------------------------------------------------------------
@given(counts, micros, st.integers(1, 64), st.integers(1, 8))
def test_a_step_has_places_for_its_sequences_and_fewer_fillers_than_a_micro_step(size, micro, ranks, fits):
    assume(size >= ranks)
    batch = batch_arithmetic(training(size, micro), ranks, "here", fits)
    share = -(-size // ranks)
    assert batch.global_size == size and batch.data_parallel_size == ranks
    assert 0 <= batch.fillers == batch.micro * batch.accumulation * ranks - size < batch.micro * ranks
    assert batch.wasted == batch.fillers / (size + batch.fillers) and ("filler" in str(batch)) == (batch.fillers > 0)
    assert batch.micro == min(micro, share) if micro != "auto" else batch.fillers < ranks
    assert ("a rank has no more" in str(batch)) == (micro != "auto" and micro > share)


@given(counts, micros, st.integers(1, 64))
def test_what_is_advised_against_fillers_leaves_none(size, micro, ranks):
    assume(size >= ranks)
    batch = batch_arithmetic(training(size, micro), ranks, "here")
    assume(batch.fillers)
    for key, values in re.findall(r"set (\w+) to (\d+(?: or \d+)?)", without_filler(batch)):
        for value in map(int, values.split(" or ")):
            changed = training(value, batch.micro) if key == "global_batch_size" else training(size, value)
            assert not batch_arithmetic(changed, ranks, "here").fillers


def test_more_ranks_than_sequences_are_refused():
    with pytest.raises(UserError, match="does not give each of 8 data-parallel ranks") as caught:
        batch_arithmetic(training(7), 8, "here")
    assert caught.value.place == "here" and "8 or more" in caught.value.cure


@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 8))
def test_an_automatic_micro_batch_is_the_largest_that_fits(share, ranks, fits):
    batch = batch_arithmetic(training(share * ranks), ranks, "here", fits, "whose")
    assert batch.micro == max(m for m in range(1, fits + 1) if share % m == 0)
    assert f"micro-batch {batch.micro} (whose) x" in str(batch)


def test_the_tiny_recipe_as_its_header_says():
    section = flags.load([]).recipe.training
    for ranks, micro, accumulation in ((1, 8, 2), (2, 8, 1), (16, 1, 1)):
        batch = batch_arithmetic(section, ranks, "here")
        assert (batch.micro, batch.accumulation) == (micro, accumulation)
    said = "micro-batch 1 (not 8: a rank has no more) x accumulation 1 x 16 data-parallel ranks"
    assert str(batch) == f"16 sequences = {said}"


def test_an_absurd_batch_takes_no_time():
    assert batch_arithmetic(training(999_983, 7), 1, "here").fillers == 2


@pytest.mark.parametrize("scaling, factor", [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_learning_rate_scaling(scaling, factor):
    options = {"learning_rate": 1e-3, "learning_rate_scaling": scaling, "reference_batch_size": 8}
    assert batch_arithmetic(training(32, **options), 2, "").learning_rate == pytest.approx(1e-3 * factor)
    assert batch_arithmetic(training(2, **options), 2, "").learning_rate == pytest.approx(1e-3 / factor)
    del options["reference_batch_size"]
    assert batch_arithmetic(training(32, **options), 2, "").learning_rate == 1e-3


@given(counts, st.sampled_from(["none", "linear", "sqrt"]), st.integers(1, 8))
def test_the_learning_rate_does_not_depend_on_the_ranks(share, scaling, ranks):
    options = training(share * ranks, learning_rate_scaling=scaling, reference_batch_size=16)
    alone, together = (batch_arithmetic(options, n, "").learning_rate for n in (1, ranks))
    assert alone == together


# ---- identity ----------------------------------------------------------------------------------------------------
# Keys that may change when a run continues. Whoever adds a key decides here, too.
WATCHING = {
    "per_device_train_batch_size", "per_device_eval_batch_size", "logging_steps", "eval_steps", "save_steps",
    "save_total_limit", "report_to", "report_page", "dataloader_num_workers", "dataset_num_proc", "eval_answers", "padding_free",
    "nonfinite", "nonfinite_limit", "loss_spike", "hang_timeout", "async_save", "tiled_loss", "tiled_mlp",
    "sync_replica", "eval_tasks", "eval_tasks_chat_template", "precompute_ref_log_probs", "profile",
    "share_prompts",
}  # fmt: skip


def document(**changed):
    whole = {
        "model": {"model_name_or_path": "m"},
        "data": {"train_file": "d"},
        "training": {"global_batch_size": 32},
        "cluster": {},
    }
    for key, value in changed.items():
        whole[SECTION_OF[key]][key] = value
    return whole


def identity_of(strategy="s", **changed):
    return identity(Recipe.model_validate(document(**changed)), strategy)


def test_auto_evaluates_fewer_held_out_samples_and_computes_the_same():
    auto, every = (Recipe.model_validate(document(max_eval_samples=value)) for value in ("auto", None))
    assert computed(auto) == computed(every) and computed(auto)["data"]["max_eval_samples"] is None
    assert computed(Recipe.model_validate(document(max_eval_samples=9))) != computed(auto)


def another_value(key):
    """A valid value of a key that is not the one in `document()`, by the field's type."""
    info = SECTIONS[SECTION_OF[key]].model_fields[key]
    now = getattr(getattr(Recipe.model_validate(document()), SECTION_OF[key]), key)
    return next(
        value for value in candidates(info.annotation) if value != now and value is not None and fits(key, value)
    )


def candidates(annotation):
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return list(arguments)
    if origin is typing.Annotated:
        return candidates(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return [value for argument in arguments for value in candidates(argument)]
    if origin is list:
        return [[], candidates(arguments[0])[:1]]
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    known = {
        str: ["other", "other=1", "own.py:loss"],
        bool: [True, False],
        int: [1, 2, 9, 4096],
        float: [0.25, 0.5, 2.0],
        dict: [{"a": 1}, {"text": "body"}, {"start": 2}, yarn],
        WeightedSource: [{"train_file": "d"}],
    }
    return known.get(origin or annotation, [])


def fits(key, value):
    try:
        identity_of(**{key: value})
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("key", SECTION_OF)
def test_identity_changes_with_what_is_computed_and_with_nothing_else(key):
    apart = key in WATCHING or SECTION_OF[key] == "cluster"
    same = identity_of(**{key: another_value(key)}) == identity_of()
    assert same == apart, "schema.py's NOT_IN_IDENTITY and WATCHING of this file have the same keys"


def test_identity_changes_with_the_strategy():
    assert identity_of("s") != identity_of("t")
    assert identity_of(["zero3", {"b": 1, "a": 2}, {}]) == identity_of(["zero3", {"a": 2, "b": 1}, {}])


@pytest.mark.parametrize("key, one, other", [
    ("learning_rate", "1e-5", 0.00001), ("weight_decay", 0, 0.0), ("max_steps", "3", 3), ("bf16", "yes", True),
    ("num_train_epochs", 1, 1.0),
])  # fmt: skip
def test_identity_is_of_values_not_of_their_spelling(key, one, other):
    assert identity_of(**{key: one}) == identity_of(**{key: other})


def test_identity_is_the_same_in_every_process():
    # Ranks and later commands compute it anew, with other hash seeds.
    code = (
        "import json, sys; from brigade.train.recipe.schema import Recipe, identity;"
        "print(identity(Recipe.model_validate(json.loads(sys.argv[1])), 's'))"
    )
    whole = document(lr_scheduler_kwargs={"b": 1, "a": {"x": [1, 2]}}, optim="lamb")
    found = run_here([sys.executable, "-c", code, json.dumps(whole)], 100, PYTHONHASHSEED="7")
    assert found.stdout.strip() == identity(Recipe.model_validate(whole), "s"), found.stderr


def test_defaults_written_out_are_the_same_run():
    recipe = Recipe.model_validate(document())
    again = Recipe.model_validate(recipe.model_dump(mode="json"))
    assert again == recipe and identity(again, "s") == identity(recipe, "s")


# ---- whose directory it is ---------------------------------------------------------------------------------------
def leave_out(section, *keys):
    return lambda document: [document[section].pop(key) for key in keys]


def put(section, **values):
    return lambda document: document[section].update(values)


DATASETS = "[{train_file: a.jsonl, weight: 0.5}, {train_file: b.jsonl, weight: 0.5}]"
ONE_STAGE = {"zero_optimization": {"stage": 1}}
DIRECTORIES = {
    # what another version left in run.yaml, and words of the refusal; None: the run continues
    "as it was": (lambda document: None, None),
    "fewer keys": (leave_out("training", "optim_args", "ddp_comm_hook", "eval_answers"), None),
    "fewer keys of a source": (lambda document: document["data"]["datasets"][1].pop("dataset_revision"), None),
    "another hash": (put("run", identity="0123"), None),
    "without a hash": (leave_out("run", "identity"), None),
    "another way of watching": (put("training", save_steps=1, eval_answers=-7), None),
    "one process of DDP": (lambda document: document["run"]["strategy"].update(kind="ddp", name="ddp"), None),
    "more keys": (put("training", sophia=True), ["training.sophia is True there", "does not know", "that version (abc+)"]),
    "a value of another version": (put("training", optim="sophia"), ["training.optim is 'sophia' there", "does not know"]),
    "another value": (put("training", learning_rate=0.5), ["training.learning_rate is 0.5 there and 2e-05 here"]),
    "another source": (lambda document: document["data"]["datasets"][0].update(weight=0.25, name="a"),
                       ["data.datasets.0.name is 'a' there and None here"]),
    "another stage": (lambda document: document["run"]["strategy"].update(kind="zero3"),
                      ["its strategy is zero3 there and single here"]),
    "another configuration": (put("cluster", ds_config=ONE_STAGE),
                              ["cluster.ds_config.zero_optimization.stage is 1 there and None here"]),
    "a key that had no default": (leave_out("training", "weight_decay"), ["weight_decay is 0.1 there and 0.0 here"]),
}  # fmt: skip


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_run_continues_under_another_version_unless_it_computes_something_else(
    name, load, tmp_path, monkeypatch, mistake
):
    from brigade.train.host.cluster import World
    from brigade.train.run import directory as runs
    from brigade.train.run.offers import Offers
    from brigade.train.strategy import Strategy

    def open_run():
        settings = load("--datasets", DATASETS, "--dataset_name=", "--output_dir", str(tmp_path / "a run"))
        strategy, world = Strategy("single", "single", ""), World(0, 0, 1, 1, "h", "python")
        opened = runs.open_directory(settings, strategy, world)
        return opened.run(settings, strategy, world, batch, runs.Kernels(), Offers())

    monkeypatch.setattr(runs.versions, "git_commit", lambda: "abc+")
    monkeypatch.setitem(BEFORE, "training", {"weight_decay": 0.1})  # a key that came with another default
    batch = types.SimpleNamespace(learning_rate=1.0)
    first = open_run()
    runs.claim(first, "data", None, {})
    file = tmp_path / "a run" / "run.yaml"
    document = yaml.safe_load(file.read_text())
    assert shlex.split(document["run"]["command"])[-2:] == ["--output_dir", str(tmp_path / "a run")]
    change, words = DIRECTORIES[name]
    change(document)
    file.write_text(yaml.safe_dump(document))
    if words is None:
        assert open_run().identity == document["run"].get("identity", first.identity)
        return
    told = mistake(open_run)
    assert all(word in told for word in words), told
    assert (f"continue the old one with --recipe '{file}' --output_dir" in told) is ("does not know" not in words)
    assert f"a directory of its own: --output_dir '{file.parent}-2'" in told
    assert told.index("-2") < told.index("--fresh")


# ---- errors ------------------------------------------------------------------------------------------------------
@given(st.text(), st.text(), st.text())
def test_an_error_is_three_lines_whatever_is_in_it(place, problem, cure):
    assert len(str(UserError(place, problem, cure)).splitlines()) == 3


def test_an_error_survives_the_way_to_another_rank():
    import pickle

    error = pickle.loads(pickle.dumps(UserError("here", "wrong", "mend it")))
    assert str(error) == "error: here\n  wrong\n  cure: mend it"


def test_names_far_from_all_others_get_the_list():
    assert nearest("qqq", ["alpha", "beta"]) is None
    assert did_you_mean("qqq", ["beta", "alpha"]) == "use one of: alpha, beta"
    assert did_you_mean("alpa", ["beta", "alpha"]) == "did you mean 'alpha'?"

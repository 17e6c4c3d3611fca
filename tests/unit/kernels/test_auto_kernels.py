"""`auto` for Liger, compiled layers and the optimizer's form: what is proven on every GPU is taken, alone each and together."""

from types import SimpleNamespace

import pytest
import transformers
import yaml

from brigade.kernels import auto, judging, models, paths, proofs, prove, trials
from brigade.train.engines.kernels import why_uncompiled
from brigade.train.host.cluster import World
from brigade.train.recipe.schema import BY_PROOF, identity, recorded
from brigade.train.strategy import Strategy, refusal
from brigade.train.strategy.axes import NONE, Axes
from testing.made_up_kernels import H100, LLAMA, RUN, SHAPES, WORLD

ALL = ("--optim", "auto", "--use_liger_kernel", "auto", "--torch_compile", "auto")
ATTENTION = {"varlen": 6.0, "sdpa": 20.0}
ALONE = {"liger": 5.0, "without_liger": 6.0, "compiled": 5.5, "uncompiled": 6.0}
OPTIMIZERS = {"adamw_torch_fused": 1.0, "adamw_torch": 3.0}


def written():
    return transformers.AutoConfig.for_model("llama", **LLAMA)


def proof_of(wrong=(), with_="varlen", **milliseconds):
    """A made-up proof: no GPU has made one. wrong: paths that compute something else"""
    table, found = paths.table(), {}
    for name, row in table.items():
        if name in milliseconds:
            status = "wrong" if name in wrong else "proven"
            found[name] = {"kind": row["kind"], "status": status, "why": "logits are off", "ms": milliseconds[name]}
        elif row["kind"] == paths.ATTENTION:
            found[name] = {"kind": row["kind"], "status": "absent", "why": ""}
        if row["kind"] == paths.SET and name in found:
            found[name]["attention"] = with_
    rows = {name: table[name] for name in found}
    key = proofs.key(models.as_json(written()), SHAPES, H100)
    about = {"key": key, "quick": False, "seconds": 9.0, "made": 0}
    return about | {"fastest": judging.judge(rows, found), "paths": found}


@pytest.fixture
def settled(load, monkeypatch, on):
    """settled(proof, flags, closed, answer): the settings of a run on an H100 that has this proof; one that it makes comes to
    `answer`, by default to the same."""
    on(H100)

    def settle(proof, *flags, closed=(), answer=None):
        asked = []
        monkeypatch.setattr(prove, "on_this_host", lambda *given, **more: asked.append(more) or answer or proof)
        if proof:
            proofs.write(proof)
        settings = load(*RUN, *flags)
        proofs_of_run = auto.settle(settings, written(), WORLD, closed)
        recipe = settings.with_training(**proofs_of_run.values).recipe
        return SimpleNamespace(recipe=recipe, asked=asked, no_sharing=proofs_of_run.no_sharing)

    return settle


def kernels(settings):
    training = settings.recipe.training
    return training.use_liger_kernel, training.torch_compile, training.optim


SETS = {"attention_alone": 6.0, "with_liger": 5.0, "with_compiled": 5.5, "with_both": 4.0}
FUSED = "adamw_torch_fused"


@pytest.mark.parametrize("sets, wrong, flags, closed, expected", [
    (SETS, (), ALL, (), (True, True, FUSED)),
    (SETS | {"with_both": 9.0}, (), ALL, (), (True, False, FUSED)),  # slower
    (SETS, ("with_both",), ALL, (), (True, False, FUSED)),  # each is right alone, and together they are wrong
    (SETS, ("with_both", "with_liger"), ALL, (), (False, True, FUSED)),
    (SETS | {"attention_alone": 3.0}, (), ALL, (), (False, False, FUSED)),
    (SETS, (), ALL[2:4], (), (True, False, FUSED)),  # what the recipe does not leave open stays
    (SETS, (), (*ALL[2:4], "--torch_compile"), (), (True, True, FUSED)),
    (SETS, (), (*ALL[2:4], "--torch_compile", "false"), (), (True, False, FUSED)),
    (SETS, (), ALL, ("use_liger_kernel",), (False, True, FUSED)),
    (SETS, (), ALL, ("use_liger_kernel", "torch_compile"), (False, False, FUSED)),
    (SETS, (), (), (), (False, False, FUSED)),
    ({}, (), ALL, (), (False, False, FUSED)),
])  # fmt: skip
def test_the_fastest_set_that_is_proven_together_is_taken(settled, sets, wrong, flags, closed, expected):
    settings = settled(proof_of(wrong, **ATTENTION, **ALONE, **OPTIMIZERS, **sets), *flags, closed=closed)
    assert kernels(settings) == expected


def test_a_slower_optimizer_is_not_taken_and_one_in_8_bits_never(settled):
    assert kernels(settled(proof_of(**ATTENTION, adamw_torch_fused=3.0, adamw_torch=1.0), *ALL[:2]))[2] == "adamw_torch"
    wrong = proof_of(("adamw_torch",), **ATTENTION, adamw_torch_fused=3.0, adamw_torch=1.0, adamw_8bit=0.1)
    assert kernels(settled(wrong, *ALL[:2]))[2] == FUSED
    optimizers = {name: row for name, row in paths.table().items() if row["kind"] == "optimizer"}
    assert [name for name, row in optimizers.items() if row.get("auto")] == [FUSED, "adamw_torch"]


def test_a_set_that_was_tried_with_another_attention_is_not_taken(settled):
    """The recipe names sdpa, and the proof is of varlen: it is made for sdpa, and here that brings nothing."""
    proof = proof_of(**ATTENTION, **ALONE, **OPTIMIZERS, **SETS)
    settings = settled(proof, *ALL, "--attn_implementation", "sdpa")
    assert kernels(settings)[:2] == (False, False)
    assert settings.asked[0]["attention"] == "sdpa" and "set" in settings.asked[0]["kinds"]
    proof = proof_of(with_="sdpa", **ATTENTION, **ALONE, **SETS)
    assert kernels(settled(proof, *ALL, "--attn_implementation", "sdpa"))[0]


def test_sets_that_a_recipe_had_tried_with_its_own_attention_are_tried_again_for_auto(settled, monkeypatch):
    before = proof_of(with_="sdpa", **ATTENTION, **ALONE, **SETS, **OPTIMIZERS)
    quick = proof_of(**ATTENTION, attention_alone=6.0, with_liger=5.0) | {"quick": True}
    settings = settled(before, *ALL, answer=quick)
    assert settings.asked[0]["attention"] == "auto" and kernels(settings)[:2] == (True, False)
    assert not settled(None, *ALL).asked, "the next run has its answer"
    jobs = []
    monkeypatch.undo()
    monkeypatch.setattr(proofs, "device", lambda index=0: H100)
    monkeypatch.setattr(prove, "_work", lambda job, *_: jobs.append(job) or True)
    prove.on_this_host(models.as_json(written()), SHAPES, True, known=before, kinds=("attention", "liger", "set"))
    assert jobs[-1]["attention"] == "varlen" and "attention_alone" in jobs[-1]["prove"]


def test_a_first_run_tries_what_its_recipe_leaves_open(settled, monkeypatch):
    few = proof_of(**ATTENTION)
    settings = settled(few, *ALL[:2])  # the proof is of a run that left only attention open
    assert set(settings.asked[0]["kinds"]) == {"attention", "optimizer"} and settings.asked[0]["known"] == few
    assert judging.to_try(few) == [] and judging.to_try(few, ("optimizer",)) == [FUSED, "adamw_torch"]
    assert not settled(proof_of(**ATTENTION, **OPTIMIZERS), *ALL[:2]).asked


ONCE = {"kind": "prompts", "status": "proven", "why": "", "attention": "varlen"}


@pytest.mark.parametrize("row, flags, why", [
    (ONCE, (), ""),
    (ONCE | {"status": "wrong", "why": "logits are off"}, (), "logits are off"),
    (ONCE | {"attention": "sdpa"}, (), "nobody has proven it"),
    (ONCE | {"attention": "sdpa"}, ("--attn_implementation", "sdpa"), ""),
    (ONCE, ("--share_prompts", "false"), "nobody has proven it"),
])  # fmt: skip
def test_pairs_share_prompts_with_the_attention_that_is_proven_for_it(settled, row, flags, why):
    """And nobody tries it who does not ask for it."""
    proof = proof_of(**ATTENTION)
    answer = proof | {"paths": proof["paths"] | {"prompts_once": row}}
    settings = settled(proof, "--objective", "dpo", *flags, answer=answer)
    assert settings.no_sharing.startswith(why) and bool(settings.no_sharing) == bool(why)
    tries = [each["kinds"] for each in settings.asked]
    assert tries == [[*["attention"] * ("--attn_implementation" not in flags), "prompts"]] * (
        "--share_prompts" not in flags
    )


def test_no_device_that_proves_nothing_shares_prompts():
    sound = {"prompts": ONCE}
    assert auto.unshared([sound, sound], "varlen") == ""
    for other in (None, {}, {"prompts": {}}, {"prompts": ONCE | {"status": "failed", "why": "no answer"}}):
        assert auto.unshared([sound, other], "varlen")


def test_all_hosts_take_what_each_has_proven(settled, monkeypatch, load):
    proofs.write(proof_of(**ATTENTION, **ALONE, **OPTIMIZERS, **SETS))
    sets = {"with_liger": 9.0, "attention_alone": 9.5}
    second = {"attention": ATTENTION, "set": sets, "optimizer": {}, "with": "varlen"}
    answers = iter([("host-2", H100["name"]), second])
    monkeypatch.setattr(auto.ranks, "gather", lambda mine: [mine, next(answers)])
    settings = load(*RUN, *ALL)
    values = auto.settle(settings, written(), World(0, 0, 2, 1, "host-1", "torchrun")).values
    assert kernels(settings.with_training(**values)) == (True, False, FUSED)


# ---- the recipe ------------------------------------------------------------------------------------------------------
def test_a_recipe_that_says_auto_is_the_same_run_whatever_is_taken(load):
    plain, open_ = load(*RUN), load(*RUN, *ALL)
    assert open_.by_proof == BY_PROOF and kernels(open_) == kernels(plain) == (False, False, FUSED)
    names = [identity(plain.recipe, "ddp"), identity(open_.before_proofs, "ddp")]
    open_ = open_.with_training(use_liger_kernel=True, torch_compile=True, optim="adamw_torch")
    assert kernels(open_) == (True, True, "adamw_torch")
    assert {*names, identity(open_.before_proofs, "ddp")} == {names[0]}
    assert (
        identity(load(*RUN, "--optim", "adamw_torch").recipe, "ddp") != names[0]
    )  # by name it is another run, as before


def test_what_is_written_down_says_auto_again(load):
    settings = load(*RUN, *ALL).with_training(use_liger_kernel=True)
    document = yaml.safe_load(yaml.safe_dump(settings.document()))
    assert {key: document["training"][key] for key in BY_PROOF} == dict.fromkeys(BY_PROOF, "auto")
    assert recorded(document).training == settings.before_proofs.training
    assert load(**document).by_proof == BY_PROOF


# ---- really computed, with the paths that CPUs have ------------------------------------------------------------------
def test_two_changes_that_are_right_alone_and_wrong_together_are_found():
    rows = {name: paths.table()[name] for name in ("varlen", "eager", "uncompiled", "attention_alone")}
    rows["one_half"] = {"kind": "layers", "change": "testing.faulty_kernels:one_half"}
    rows["other_half"] = {"kind": "layers", "change": "testing.faulty_kernels:other_half"}
    rows["with_one"] = {"kind": "set", "uses": ["one_half"]}
    rows["with_halves"] = {"kind": "set", "uses": ["one_half", "other_half"]}
    events = []
    job = {"config": models.as_json(written()), "shapes": SHAPES | {"dtype": "fp32"}, "device": "cpu", "rows": rows}
    todo = ["one_half", "other_half", "attention_alone", "with_one", "with_halves"]
    trials.Trials(job | {"prove": todo, "time": [], "rounds": 1, "attention": "varlen"}, events.append).run()
    status = {event["path"]: event["status"] for event in events if event.get("stage") == "prove" and "path" in event}
    assert status == dict.fromkeys(todo, "proven") | {"with_halves": "wrong"}


def test_a_set_whose_part_is_not_proven_is_not_tried():
    rows = {name: paths.table()[name] for name in ("attention_alone", "with_liger")}
    limits = {"seconds": 0.0, "path": 1.0, "rounds": 1}
    found = prove.on_this_host(models.as_json(written()), SHAPES, rows=rows, limits=limits)["paths"]
    assert found["with_liger"]["status"] == "absent" and found["with_liger"]["why"] == "liger is not proven here"


@pytest.mark.slow
def test_compiled_layers_are_proven_together_with_the_attention_of_a_cpu():
    table = paths.table()
    names = ("varlen", "eager", "compiled", "uncompiled", "attention_alone", "with_compiled")
    rows = {name: table[name] for name in names}
    limits = {"seconds": 500.0, "path": 240.0, "rounds": 1}
    small = models.as_json(transformers.AutoConfig.for_model("llama", **LLAMA | {"vocab_size": 256}))
    shapes = SHAPES | {"dtype": "fp32", "max_length": 64}
    proof = prove.on_this_host(small, shapes, rows=rows, limits=limits)
    assert {proof["paths"][name]["status"] for name in ("attention_alone", "with_compiled")} <= {"proven", "slower"}
    assert proof["paths"]["with_compiled"]["attention"] == "varlen" and proof["fastest"]["set"]


# ---- where a run computes in another way than a proof ----------------------------------------------------------------
COMPILED = "torch_compile"


@pytest.mark.parametrize("kind, axes, flags, expected", [
    ("single", NONE, (), set()),
    ("ddp", NONE, (), set()),
    ("zero2", NONE, (), set()),
    ("zero3", NONE, (), {COMPILED}),
    ("fsdp2", NONE, (), set()),
    ("zero1", Axes(tensor=2), (), {COMPILED}),
    ("ddp", NONE, ("--tiled_loss", "true"), set()),
    ("ddp", NONE, ("--tiled_mlp", "auto"), {COMPILED}),
    ("fsdp2", NONE, ("--activation_checkpointing",), {COMPILED}),
    ("zero2", NONE, ("--activation_checkpointing",), set()),
    ("ddp", NONE, ("--activation_checkpointing", "selective"), {COMPILED}),
])  # fmt: skip
def test_what_no_proof_decides(load, kind, axes, flags, expected):
    training, strategy = load(*RUN, *ALL, *flags).recipe.training, Strategy(kind, kind, "flag", axes=axes)
    assert auto.closed(training, strategy, compiler=True) == expected
    assert auto.closed(training, strategy, compiler=False) == expected | {COMPILED}


def test_the_runs_table_says_why_auto_compiles_nothing(load):
    asked, named = load(*RUN, *ALL), load(*RUN, "--torch_compile", "false")
    assert why_uncompiled(asked) == "off: nothing is proven without a GPU"
    assert why_uncompiled(named) == why_uncompiled(asked.with_training(torch_compile=True)) == ""


def test_compiled_layers_with_adapters_are_not_computed_again_under_fsdp2():
    asked = {"method": "lora", "torch_compile": True, "activation_checkpointing": True}
    assert refusal(kind="fsdp2", **asked)["key"] == COMPILED and refusal(kind="zero3", **asked) is None

"""A micro-batch of samples with and without images gives each sample the logits and gradients that it has by itself."""

import copy
import functools
import importlib

import numpy as np
import pytest
import torch

from brigade.train.data.collate import ABOUT, Collate, Layout
from brigade.train.distributed.process import this_process
from brigade.train.engines.parallel.sequence import DividedSequences, cut_before_decoder
from brigade.train.model.images.processor import models
from brigade.train.model.images.tower import TOWER, take_over
from brigade.train.recipe.objectives import ANSWERS
from brigade.train.upstream import samples_end_to_end
from testing.marks import cases
from testing.vision_configs import MODELS, QUICK
from testing.vision_kinds import KINDS

# Images, by their sizes, of each sample; they stand within its text.
SAMPLES = [[], [(32, 32), (48, 20)], [(17, 60)], [(32, 32)]]
NOT_FOR_LOGITS = {ABOUT, TOWER, "labels", "logits_to_keep", "shift_labels"}
# Of Llama 4 varlen is refused, which computes no chunks (model/attention.py: BEYOND_VARLEN).
BY_VARLEN = [kind for kind in MODELS if not models()[kind].masks and kind != "llama4"]
EVERY = [(kind, how) for kind in MODELS for how in ("sdpa", "varlen") if how == "sdpa" or kind in BY_VARLEN]
WAYS = cases(*(way for way in EVERY if way[0] in QUICK), slow=[way for way in EVERY if way[0] not in QUICK])


@functools.cache
def alone(model, number):
    """A sample by itself, as the real processor makes it: forward()'s arguments."""
    token = model.processor.image_token
    text = f"sample {number}" + "".join(f": {token} is {n}" for n in range(len(SAMPLES[number]))) + " and so on."
    images = {"images": [source.open() for source in model.sources[number]]} if SAMPLES[number] else {}
    return model.processor.own(text=[text], return_tensors="pt", **images)


@pytest.fixture
def vision(written, picture):
    """Return a function that gives a Written with the sources of SAMPLES."""

    def call(kind):
        model = written(kind)
        model.sources = model.sources or [
            [picture(10 * number + n, *size) for n, size in enumerate(sizes)] for number, sizes in enumerate(SAMPLES)
        ]
        return model

    return call


def sequence(model, *numbers):
    """A TokenSequence of these samples; each token that is not an image's is supervised, but the first of a sample."""
    ids = [alone(model, number)["input_ids"][0].numpy().astype(np.int32) for number in numbers]
    labels = [np.where(each == model.processor.image_token_id, -100, each).astype(np.int64) for each in ids]
    for each in labels:
        each[0] = -100
    return {
        "input_ids": np.concatenate(ids),
        "labels": np.concatenate(labels),
        "lengths": np.array([len(each) for each in ids]),
        "images": [source for number in numbers for source in model.sources[number]],
    }


def logits_of(made, batch):
    arguments = {name: each for name, each in batch.items() if name not in NOT_FOR_LOGITS}
    return made(**arguments, use_cache=False).logits


def summed_loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")


def gradients(made):
    return {name: each.grad.clone() for name, each in made.named_parameters() if each.grad is not None}


@functools.cache
def reference(model, number):
    """Logits of a sample by itself, and the gradients of its loss."""
    made = model.model()
    logits = made(**alone(model, number), use_cache=False).logits[0]
    summed_loss(logits, torch.from_numpy(sequence(model, number)["labels"])).backward()
    return logits.detach(), gradients(made)


def parts(model, numbers):
    """Logits of each of these samples by itself."""
    return [reference(model, number)[0] for number in numbers]


def collated(model, sequences, how="sdpa", padding_free=True, packed=True, **more):
    collate = Collate(0, Layout(padding_free, packed, cumulative=how == "varlen", processor=model.processor, **more))
    return collate((sequences, None))


def furthest(ones, others):
    return max((one - other).abs().max().item() for one, other in zip(ones, others, strict=True))


def are_equal(ones, others):
    """To fp32's rounding, beside the largest logit."""
    return furthest(ones, others) < 1e-5 * max(1, max(each.abs().max().item() for each in others))


def lengths_of(model, numbers):
    return [alone(model, number)["input_ids"].shape[1] for number in numbers]


def flat(model, how="sdpa"):
    """A text, two samples of one sequence, one more, and a blank."""
    sequences = [sequence(model, 0), sequence(model, 1, 2), sequence(model, 3), model.processor.blank()]
    return collated(model, sequences, how)


@pytest.mark.parametrize("kind, how", WAYS)
def test_samples_end_to_end_have_the_logits_that_they_have_alone(kind, how, vision):
    model = vision(kind)
    with torch.no_grad():
        lengths = [*lengths_of(model, range(4)), len(model.processor.blank()["labels"])]
        got = logits_of(model.model(how), flat(model, how))[0].split(lengths)
    assert are_equal(got[:4], parts(model, range(4)))


@pytest.mark.parametrize("kind", KINDS)
def test_padded_samples_have_the_logits_that_they_have_alone(kind, vision):
    model, numbers = vision(kind), [2, 0, 1]
    with torch.no_grad():
        batch = collated(model, [sequence(model, number) for number in numbers], padding_free=False, packed=False)
        logits = logits_of(model.model(), batch)
    got = [row[:length] for row, length in zip(logits, lengths_of(model, numbers), strict=True)]
    assert are_equal(got, parts(model, numbers))


@pytest.mark.parametrize("kind", [kind for kind in MODELS if models()[kind].masks])
def test_masks_of_transformers_own_are_wrong_behind_the_first_sample(kind, vision, monkeypatch):
    """Once this fails, brigade/train/upstream/samples_end_to_end.py is needed no longer."""
    model = vision(kind)
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    monkeypatch.setattr(module, samples_end_to_end.NAME, getattr(module, samples_end_to_end.NAME).plain)
    with torch.no_grad():
        got = logits_of(model.model(), flat(model))[0].split(
            [*lengths_of(model, range(4)), len(model.processor.blank()["labels"])]
        )
    assert furthest(got[1:4], parts(model, range(1, 4))) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_in_another_sample_is_told_by_its_logits(kind, vision):
    """Two images of one size, each in the other's sample: nothing but the comparison above can find that."""
    model, numbers = vision(kind), [1, 3]
    sequences = [sequence(model, number) for number in numbers]
    first, second = sequences[0]["images"], sequences[1]["images"]
    sequences[0]["images"], sequences[1]["images"] = [second[0], first[1]], [first[0]]
    with torch.no_grad():
        got = logits_of(model.model(), collated(model, sequences))[0].split(lengths_of(model, numbers))
    assert min(furthest([one], [other]) for one, other in zip(got, parts(model, numbers), strict=True)) > 1e-3


@pytest.mark.parametrize("kind, how", WAYS)
def test_gradients_are_the_sum_of_each_samples_own(kind, how, vision):
    """Also those of the tower's parameters; the blank has no label, and gives nothing."""
    model, batch = vision(kind), flat(vision(kind), how)
    expected = dict[str, torch.Tensor]()
    for number in range(4):
        for name, each in reference(model, number)[1].items():
            expected[name] = expected[name] + each if name in expected else each
    made = model.model(how)
    summed_loss(logits_of(made, batch)[0], batch["labels"][0]).backward()
    got = gradients(made)
    tower = [name for name in expected if name not in reference(model, 0)[1]]
    assert set(got) == set(expected) and any(expected[name].abs().max() > 1e-3 for name in tower)
    for name, each in expected.items():
        assert (got[name] - each).abs().max() <= 2e-5 * max(each.abs().max().item(), 1), name


@pytest.mark.parametrize("kind, how", WAYS)
def test_a_blank_lets_the_tower_run_and_gives_its_parameters_exactly_zero(kind, how, vision):
    model = vision(kind)
    batch, expected = collated(model, [sequence(model, 0)], how, always_image=True), reference(model, 0)[1]
    assert batch[ABOUT].tokens == lengths_of(model, [0])[0] < batch[ABOUT].slots
    of_images, made = reference(model, 1)[1], model.model(how)
    summed_loss(logits_of(made, batch)[0], batch["labels"][0]).backward()
    got = gradients(made)
    assert set(got) == set(of_images)
    for name, each in got.items():
        if name in expected:
            assert (each - expected[name]).abs().max() <= 2e-5 * max(expected[name].abs().max().item(), 1), name
        else:
            assert not each.any(), name


def test_a_blank_is_added_only_where_there_is_no_image(vision):
    model = vision("qwen2_5_vl")
    of_text, with_image, blank = sequence(model, 0), sequence(model, 3), model.processor.blank()
    batch = collated(model, [of_text, with_image], always_image=True)
    assert batch[ABOUT].slots == batch[ABOUT].tokens == len(of_text["labels"]) + len(with_image["labels"])
    assert "pixel_values" not in collated(model, [of_text])
    padded = collated(model, [of_text, of_text], padding_free=False, packed=False, always_image=True)
    assert padded["input_ids"].shape[0] == 3 and padded["pixel_values"].shape[0] == 4 * len(blank["labels"])
    assert padded[ABOUT].supervised == 2 * int((of_text["labels"] != -100).sum())


def test_images_that_touch_are_refused_where_positions_cannot_tell_them_apart(vision, mistake):
    model = vision("qwen2_5_vl")
    touching = sequence(model, 1)
    image = np.full(4, model.processor.image_token_id)
    touching |= {"input_ids": np.concatenate([image, image]), "labels": np.full(8, -100), "lengths": np.array([8])}
    assert "follow each other" in mistake(collated, model, [touching])


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_a_token_of_images_without_an_image_is_refused(kind, vision, mistake):
    model = vision(kind)
    lonely = sequence(model, 3) | {"images": []}
    assert "token of images" in mistake(lambda: collated(model, [sequence(model, 0), lonely]))


@pytest.mark.parametrize("kind", [kind for kind in MODELS if models()[kind].grids])
def test_a_tower_that_is_told_of_its_grids_computes_the_same(kind, vision):
    """Bit for bit; and it reads what it is told."""
    model = vision(kind)
    made, batch = model.model(), flat(model)
    told = batch[TOWER]
    take_over(made)
    with torch.no_grad():
        alone = logits_of(made, batch)
        with this_process.forward_pass.told(of_tower=told):
            assert torch.equal(logits_of(made, batch), alone)
        with this_process.forward_pass.told(of_tower={**told, "position_ids": told["position_ids"].flip(0)}):
            assert not torch.equal(logits_of(made, batch), alone)


# ---- sequences that ranks divide -------------------------------------------------------------------------------------
class _Entered(Exception):
    """The decoder was called, with these keywords."""


def _at_the_decoder(made, batch):
    """Return what the decoder is called with."""

    def stop(_, args, given):
        assert not args
        raise _Entered(given)

    hook = made.get_decoder().register_forward_pre_hook(stop, with_kwargs=True)
    try:
        logits_of(made, batch)
    except _Entered as entered:
        return entered.args[0]
    finally:
        hook.remove()


@pytest.mark.parametrize("kind", BY_VARLEN)
def test_parts_of_sequences_have_their_features(kind, vision):
    """Each rank's decoder gets its part of the embeddings, in which an image's features are, and of what stands beside them."""
    model, of = vision(kind), 2
    several = (0, 2, 3) if model.processor.most_images else (0, 1, 3)
    made = copy.deepcopy(model.model("varlen"))
    rows = ([sequence(model, number) for number in several], 17)
    how = (False, False, ANSWERS, False, model.processor, True)
    plain = Collate(0, Layout(True, True, True, of, *how))(rows)
    whole = _at_the_decoder(made, plain)
    parts = []
    for number in range(of):
        divided = copy.deepcopy(made)
        cut_before_decoder(divided, number, of)
        batch = DividedSequences(0, Layout(True, True, True, 1, *how), number=number, of=of)(rows)
        parts.append(_at_the_decoder(divided, batch))
    for key, dimension in (("inputs_embeds", 1), ("position_ids", -1), ("visual_pos_masks", 1)):
        if whole.get(key) is not None:
            assert torch.equal(torch.cat([part[key] for part in parts], dimension), whole[key]), key
    for layer, features in enumerate(whole.get("deepstack_visual_embeds") or ()):
        assert torch.equal(torch.cat([part["deepstack_visual_embeds"][layer] for part in parts]), features)
    assert len({part["inputs_embeds"].shape for part in parts}) == 1
    assert all(torch.equal(part["cu_seq_lens_q"], plain["cu_seq_lens_q"]) for part in parts)

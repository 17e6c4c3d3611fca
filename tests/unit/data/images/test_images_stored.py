"""Prepared samples with images: what a run reads of them, when the same data is made anew, and what is said of it."""

import copy
import io
import os
import pickle
import shutil

import numpy as np
import pytest
from PIL import Image

from brigade.train.data import build, report, rows, tokenise
from brigade.train.data.rows import BadRow
from brigade.train.data.store import IGNORED
from brigade.train.recipe.batch import Batch
from testing.images import (
    IMAGE,
    LISTS,
    MARKED_SHORT,
    PIXELS,
    SMALL,
    TEMPLATE,
    WIDE,
    A,
    Processor,
    asked,
    encoded,
    with_images,
)

HELD = [{"messages": [asked("Held out?"), A]}]


def row(question, *images):
    return {"messages": [asked(question), A], "images": list(images)}


ROWS = [row("<image>?", "a.png"), row("How are you?"), row("<image> or <image>?", "sub/b.jpg", "a.png")]


@pytest.fixture
def prepared(prepare, knowing, folder, write):
    """prepared(rows, template=..., **data): what is prepared from train.jsonl, which holds them."""

    def call(content=ROWS, held=HELD, tokenizer=knowing, **data):
        data = {"train_file": write("train.jsonl", content), "validation_file": write("held.jsonl", held)} | data
        data = {"images": True, "chat_template": None} | data
        return prepare(tokenizer=tokenizer, processor=Processor(tokenizer), **data)

    return call


def pixels(image):
    return np.asarray(image.open())


def sizes(sequence):
    return [(image.width, image.height) for image in sequence["images"]]


def test_each_sequence_has_its_images(prepared, knowing):
    samples = prepared().train
    assert [sizes(sequence) for sequence in samples] == [[SMALL], [], [WIDE, SMALL]]
    image = knowing.convert_tokens_to_ids(IMAGE)
    for sequence in samples:
        own = sequence["input_ids"] == image
        assert own.sum() == sum(width * height // PIXELS for width, height in sizes(sequence))
        assert (sequence["labels"][own] == IGNORED).all()
        assert all(pixels(image).shape == (image.height, image.width, 3) for image in sequence["images"])
    again = pickle.loads(pickle.dumps(samples))
    assert sizes(again[2]) == [WIDE, SMALL] and again[2]["images"] == samples[2]["images"]


def test_packed_sequences_have_the_images_of_all_their_samples(prepared):
    (sequence,) = prepared(packing=True, max_length=256).train
    alone = prepared().train
    order = [int(length) for length in sequence["lengths"]]
    by_length = {len(sample["input_ids"]): sample["images"] for sample in alone}
    assert sequence["images"] == [image for length in order for image in by_length[length]]


def test_data_without_images_has_no_such_key(from_rows):
    samples = from_rows({"text": "a"}).train
    assert set(samples[0]) == {"input_ids", "labels", "lengths"}
    assert not [path for path in samples.folder.iterdir() if "image" in path.name]


def test_without_images_nothing_of_a_fingerprint_differs(from_rows, monkeypatch):
    contents, digest = [], build._digest
    monkeypatch.setattr(build, "_digest", lambda content: contents.append(content) or digest(content))
    from_rows({"text": "a"})
    ((_, _, how, *_),) = contents
    assert set(how) == {"tokenizer", "templates", "variables", "end", "max_length", "truncation"}


def test_a_recipe_with_images_needs_a_processor(load, knowing):
    with pytest.raises(ValueError, match="needs the model's processor"):
        tokenise.encoder_of(load(data={"images": True}), knowing)


def test_any_number_of_processes_prepares_the_same(prepared, monkeypatch):
    content = [row(f"<image> {number}?", ("a.png", "sub/b.jpg")[number % 2]) for number in range(40)]
    one = prepared(content, dataset_num_proc=1)
    monkeypatch.setattr(rows, "CHUNK_BYTES", 500)
    shutil.rmtree(one.folder)
    two = prepared(content, dataset_num_proc=2)
    assert two.fingerprint == one.fingerprint and [sizes(each) for each in two.train] == [[SMALL], [WIDE]] * 20


# ---- the datasets library ----------------------------------------------------------------------------------------
@pytest.fixture
def stored():
    """A set with a column of PIL images, as the datasets library keeps them."""
    from datasets import Dataset, Features, List, Value
    from datasets import Image as Picture

    files = [io.BytesIO(encoded(*size, colour=(9, 8, 7))) for size in (SMALL, WIDE)]
    turn = {"role": Value("string"), "content": Value("string")}
    features = Features({"messages": List(turn), "images": List(Picture())})
    content = [
        {"messages": [asked("<image>?"), A], "images": [Image.open(files[0])]},
        {"messages": [asked("Hi."), A], "images": []},
        {"messages": [asked("<image>, <image>?"), A], "images": [Image.open(file) for file in files]},
    ]
    return Dataset.from_list(content, features=features)


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_pictures_of_the_datasets_library(prepared, stored, tmp_path, kind):
    if kind == "parquet":
        stored.to_parquet(str(tmp_path / "set.parquet"))
        samples = prepared(train_file=str(tmp_path / "set.parquet")).train
    else:
        stored.save_to_disk(str(tmp_path / "set"))
        samples = prepared(train_file=None, dataset_name=str(tmp_path / "set")).train
    assert [sizes(sequence) for sequence in samples] == [[SMALL], [], [SMALL, WIDE]]
    assert all((pixels(image) == (9, 8, 7)).all() for sequence in samples for image in sequence["images"])


# ---- bad rows ----------------------------------------------------------------------------------------------------
def test_a_bad_image_names_file_and_row(prepared, mistake, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"hello")
    content = [*ROWS, row("<image>", "broken.png"), row("<image>", "nowhere.png")]
    message = mistake(prepared, content)
    assert f"{tmp_path / 'train.jsonl'}, line 4" in message and "'broken.png'" in message and "2 rows" in message
    found = prepared(content, skip_bad_rows=True)
    assert len(found.train) == 3 and found.facts["skipped"] == 2
    assert "skip_bad_rows" in ", ".join(report.losses(found.facts))


def test_lint_reads_the_first_rows(load, folder, write):
    from brigade.lint.rows import findings

    def found(**data):
        data = {"dataset_name": None, "images": True} | data
        return [finding.problem for finding in findings("r.yaml", load(data=data))]

    assert not found(train_file=write("good.jsonl", ROWS))
    (said,) = found(train_file=write("bad.jsonl", [row("<image>", "nowhere.png")]))
    assert "the image 'nowhere.png' is missing" in said and "bad.jsonl" in said
    assert "line 21" not in str(found(train_file=write("later.jsonl", [*(ROWS * 20)[:20], row("<image>")])))
    assert not found(train_file=write("far.jsonl", [row("<image>", "https://a.invalid/a.png")]), fetch_images=True)


# ---- the cache ---------------------------------------------------------------------------------------------------
def test_a_changed_file_is_found_and_prepared_anew(prepared, mistake, folder):
    before = prepared()
    images = [image for sequence in before.train for image in sequence["images"]]
    os.utime(folder / "a.png", (1, 1))
    assert prepared().fingerprint == before.fingerprint
    made = (before.folder / "tokens").stat().st_ino
    (folder / "a.png").write_bytes(encoded(*SMALL, colour=(1, 2, 3)))
    message = mistake(images[0].open)
    assert str(folder / "a.png") in message and "has changed since" in message
    after = prepared()
    assert after.fingerprint != before.fingerprint and after.folder == before.folder
    assert (after.folder / "tokens").stat().st_ino != made
    assert (pixels(after.train[0]["images"][0]) == (1, 2, 3)).all()
    (folder / "a.png").unlink()
    assert "cannot be read now" in mistake(after.train[0]["images"][0].open)
    assert "is missing" in mistake(prepared)
    (folder / "a.png").write_bytes(encoded(*SMALL))
    assert prepared().fingerprint == before.fingerprint


def test_the_same_content_elsewhere_is_the_same_data(prepared, folder, tmp_path):
    before = prepared()
    shutil.copytree(folder / "sub", tmp_path / "other" / "sub")
    shutil.copy(folder / "a.png", tmp_path / "other" / "a.png")
    after = prepared(image_folder=str(tmp_path / "other"))
    assert after.fingerprint == before.fingerprint and after.folder != before.folder
    assert after.train[0]["images"][0].path == str(tmp_path / "other" / "a.png")
    assert prepared().folder == before.folder


def test_what_makes_other_data(prepared, monkeypatch):
    fingerprints = [prepared().fingerprint, prepared(max_pixels=32).fingerprint, prepared(min_pixels=640).fingerprint]
    monkeypatch.setattr(Processor, "identity", lambda self: "another version")
    fingerprints.append(prepared().fingerprint)
    assert len(set(fingerprints)) == 4


def test_a_question_about_another_image_is_another_sample(prepared, folder):
    (folder / "c.png").write_bytes(encoded(*SMALL, colour=(5, 5, 5)))
    held = [row("<image>?", "c.png"), row("<image>?", "a.png")]
    assert prepared(held=held).facts["shared"] == 1


def test_a_folder_that_is_not_there(prepared, mistake, tmp_path):
    assert "is no folder" in mistake(prepared, image_folder=str(tmp_path / "nowhere"))


def test_data_without_any_image_is_refused(prepared, mistake):
    """Some rows of text alone may stand among those with images; all of them train a model blind."""
    content = [{"messages": [asked("Hi?"), A], "images": ["a.png"], "caption": "x"}] * 3
    said = mistake(prepared, content, columns={"ignore": "images"})
    assert "none of 3 training samples has an image" in said and "column 'caption'" in said
    assert "columns: {images: NAME}" in said


# ---- what is said ------------------------------------------------------------------------------------------------
def test_figures_count_images(prepared, load, knowing):
    found, settings = prepared(), load(data={"images": True})
    words = report.figures(found, settings.recipe.data, settings.recipe.training, Batch(1, 1, 1, 1, 1e-5))
    assert "3 images in 2 of them" in words and "scaled by" not in words
    assert prepared(min_pixels=640).facts["scaled"] == 3
    shown = report.sample(prepared(min_pixels=64 * 64), knowing).plain
    assert f"<s>{IMAGE} (x 256) </s>?" in shown and shown.count(IMAGE) == 1


# ---- templates ---------------------------------------------------------------------------------------------------
def learned(tokenizer, sequence):
    return tokenizer.decode([int(label) for label in sequence["labels"] if label != IGNORED])


@pytest.mark.parametrize(
    "template", [TEMPLATE, LISTS, MARKED_SHORT], ids=["marked", "lists only", "marked without ends"]
)
def test_a_tokenizers_own_template(prepared, knowing, template):
    """Also one that shows nothing of a text, and one whose marks leave out the token that ends a turn."""
    tokenizer = with_images(copy.deepcopy(knowing), template)
    found = prepared(tokenizer=tokenizer)
    for sequence in found.train:
        assert learned(tokenizer, sequence).strip() == "A dog.<|im_end|>"
    assert "How are you?" in tokenizer.decode(found.train[1]["input_ids"])
    assert found.chat_format.stops == tokenizer.convert_tokens_to_ids(["<|im_end|>"]) and found.chat_format.own


def test_no_template_of_ours_stands_in_for_one_that_writes_images(prepared, knowing):
    unmarked = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    own = with_images(copy.deepcopy(knowing), unmarked)
    chats = prepared(tokenizer=own).chat_format
    assert not chats.stands_in and chats.turn_by_turn


def test_a_prompt_with_an_image(load, knowing, folder):
    from brigade.train.data.encode import LoadedEncoder
    from brigade.train.data.images import MARK, NO_RULES, ImageReader

    loaded = LoadedEncoder(
        tokenise.encoder_of(load(data={"images": True, "chat_template": None}), knowing, Processor(knowing))
    )
    image = ImageReader(NO_RULES, folder).read("a.png")
    ids = loaded.prompt([asked(f"{MARK}What?")], [image])
    assert ids.count(knowing.convert_tokens_to_ids(IMAGE)) == 4
    with pytest.raises(BadRow, match="has 0 images"):
        loaded.prompt([asked(f"{MARK}What?")])


# ---- keys --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("data, said", [
    ({"max_pixels": 4}, "data.images is not true"), ({"fetch_images": True}, "data.images is not true"),
    ({"image_folder": "a"}, "data.images is not true"), ({"columns": {"images": "pictures"}}, "data.images is not true"),
    ({"datasets": [{"dataset_name": "a", "image_folder": "b"}], "dataset_name": None}, "data.images is not true"),
    ({"images": True, "max_pixels": 4, "min_pixels": 5}, "5 is more than max_pixels, 4"),
    ({"images": True, "streaming": True}, "images are looked at once"),
    ({"images": True, "image_folder": "a", "datasets": [{"dataset_name": "a"}], "dataset_name": None}, "each source has its own"),
])  # fmt: skip
def test_keys_that_nobody_would_read(load, mistake, data, said):
    assert said in mistake(load, data=data)


def test_columns_of_other_names(prepared):
    content = [{"messages": [asked("<image>?"), A], "pictures": ["a.png"]}]
    assert sizes(prepared(content, columns={"images": "pictures"}).train[0]) == [SMALL]

"""A run with images to its end: answers with their pictures, the page, eval, chat and what is handed on."""

import json

import pyarrow.parquet
import pytest

import train
from brigade.__main__ import main
from brigade.train.model.images.load import read_processor
from testing.command_line import as_flags
from testing.ranks import REPOSITORY

RECIPE = REPOSITORY / "recipes/tiny-vision/full.yaml"


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The directory of the tiny recipe's run, which is what a user is told to start with."""
    folder = tmp_path_factory.mktemp("images") / "run"
    train.main(as_flags(recipe=str(RECIPE), output_dir=str(folder), eval_answers=8, report_to="none"))
    return folder


@pytest.mark.slow
def test_answers_have_their_pictures_also_on_the_page(output):
    answers = [json.loads(line) for line in (output / "answers.jsonl").read_text().splitlines()]
    assert len(answers) >= 8
    for answer in answers:
        assert answer["question"].count("<|image_pad|>") == 1
        assert [image[:22] for image in answer["images"]] == ["data:image/png;base64,"]
    page = (output / "report.html").read_text()
    assert page.count('<img src="data:image/png') >= 8


@pytest.mark.slow
def test_chat_is_about_an_image(output, tmp_path, capsys):
    from PIL import Image

    Image.new("RGB", (32, 32), "red").save(tmp_path / "red.png")
    asked = ["chat", str(output), "--max_new_tokens", "3", "--question", "How many shapes are there?"]
    assert main([*asked, "--image", str(tmp_path / "red.png"), "--image", str(tmp_path / "red.png")]) == 0
    assert "> How many shapes are there?" in capsys.readouterr().err
    (tmp_path / "broken.png").write_bytes(b"no image")
    assert main([*asked, "--image", str(tmp_path / "broken.png")]) == 2
    assert "broken.png' is broken" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_handed_on_has_the_processor(output, tmp_path):
    from transformers import AutoConfig, AutoTokenizer

    assert main(["export", str(output), str(tmp_path / "model")]) == 0
    for folder in (output, tmp_path / "model"):
        config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        processor = read_processor("a test", str(folder), None, config, tokenizer)
        assert processor.expansion(32, 32).count("<|image_pad|>") == 4


@pytest.mark.slow
def test_the_tiny_recipe_answers_right(output, tmp_path, capsys):
    """About colour, shape, number and place on pictures that it has not seen, and not before training."""
    assert main(["eval", str(output), "--answers", "8", "--exact", "0.9"]) == 0
    assert "% are the reference's, word by word; 0% before training" in capsys.readouterr().out
    with pyarrow.parquet.ParquetFile(RECIPE.with_name("heldout.parquet")) as heldout:
        row = heldout.read().to_pylist()[0]
    (tmp_path / "picture.png").write_bytes(row["images"][0]["bytes"])
    answer_of = {
        row["messages"][n]["content"].removeprefix("<image>"): row["messages"][n + 1]["content"] for n in (0, 2, 4, 6)
    }
    for question, answer in answer_of.items():
        assert main(["chat", str(output), "--question", question, "--image", str(tmp_path / "picture.png")]) == 0
        assert capsys.readouterr().out.strip() == answer


def test_a_rehearsal_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        train.main([*as_flags(recipe=str(RECIPE), output_dir=str(tmp_path)), "--rehearse"])
    assert "have no images" in capsys.readouterr().err

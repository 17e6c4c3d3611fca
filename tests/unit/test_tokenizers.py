"""A tokenizer has to be the model's: every token that the model knows under its own id, and none beyond its embeddings."""

import copy
import json

import pytest
import transformers

from brigade.train.data import builtin
from brigade.train.model.tokenizer import load_tokenizer, vocabulary
from brigade.train.recipe.files import REPOSITORY


@pytest.fixture(scope="module")
def own():
    return transformers.AutoTokenizer.from_pretrained(builtin.TOKENIZER)


@pytest.fixture
def save(tmp_path):
    """save(tokenizer, name): its directory."""

    def call(tokenizer, name):
        tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return call


@pytest.fixture
def changed(own, tmp_path):
    """changed(change): the tokenizer after change(the content of its tokenizer.json), in a directory."""

    def call(change):
        own.save_pretrained(tmp_path / "other")
        content = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
        change(content)
        (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(content))
        return str(tmp_path / "other")

    return call


@pytest.fixture
def model(own, save, tmp_path):
    """A model's directory: a config of 4096 tokens, and its own tokenizer."""
    folder = save(own, "model")
    (tmp_path / "model" / "config.json").write_text((REPOSITORY / "recipes/tiny/config.json").read_text())
    return folder


@pytest.fixture
def tokenizer_of(load):
    """tokenizer_of(model, tokenizer): what a run with this model and tokenizer gets."""

    def call(model, tokenizer=None, **more):
        settings = load(
            model={"model_name_or_path": model, "tokenizer_name_or_path": tokenizer} | more, data={"max_length": 256}
        )
        return load_tokenizer(settings, vocabulary(settings))

    return call


def swap(some, other):
    """Exchange the ids of two tokens, in vocabulary and special tokens."""

    def change(content):
        words = content["model"]["vocab"]
        words[some], words[other] = words[other], words[some]
        for token in content["added_tokens"]:
            token["id"] = words[token["content"]]

    return change


# ---- ids ---------------------------------------------------------------------------------------------------------
def test_the_models_own(tokenizer_of, model, own):
    assert tokenizer_of(model).get_vocab() == own.get_vocab()
    assert tokenizer_of(model, tokenizer=model).get_vocab() == own.get_vocab()
    assert tokenizer_of(model, tokenizer="python-docs").get_vocab() == own.get_vocab(), "the same under another name"


@pytest.mark.parametrize("some, other", [
    ("<|im_end|>", "<|endoftext|>"), ("<|im_start|>", "<|im_end|>"), ("the", "a"),
], ids=["eos and pad", "begin and end of a turn", "words"])  # fmt: skip
def test_tokens_of_other_ids(tokenizer_of, mistake, changed, model, own, some, other):
    given = changed(swap(some, other))
    message = mistake(tokenizer_of, model, given)
    place, problem, cure = message.splitlines()
    assert "model.tokenizer_name_or_path" in place and repr(given) in problem and repr(model) in problem
    token = next(token for token in (some, other) if repr(token) in problem)
    there, here = own.convert_tokens_to_ids([token, other if token == some else some])
    assert f"is {there} there, and here {here}" in problem and "leave the key out" in cure


def test_a_token_that_is_missing(tokenizer_of, mistake, changed, model):
    def forget(content):
        content["model"]["vocab"]["another"] = content["model"]["vocab"].pop("ÿ")  # a byte that no text has

    given = changed(forget)
    message = mistake(tokenizer_of, model, given)
    assert "token 'ÿ' is" in message and "here missing" in message


def test_further_tokens_belong_as_long_as_the_model_has_room(tokenizer_of, mistake, model, own, save, tmp_path):
    """Two tokens for tools, say, in rows of the embedding that the model left free."""
    more = copy.deepcopy(own)
    more.add_tokens(["<|call|>", "<|result|>"], special_tokens=True)
    given = save(more, "more")
    message = mistake(tokenizer_of, model, given)
    assert "model.tokenizer_name_or_path" in message and repr(given) in message
    assert "4098 tokens" in message and "vocabulary 4096" in message and "model's own" in message.splitlines()[-1]
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 4160}))
    assert tokenizer_of(model, given).convert_tokens_to_ids("<|result|>") == 4097


def test_a_models_own_tokenizer_beyond_its_embeddings(tokenizer_of, mistake, own, save, tmp_path):
    more = copy.deepcopy(own)
    more.add_tokens(["<|call|>"])
    model = save(more, "grown")
    (tmp_path / "grown" / "config.json").write_text((REPOSITORY / "recipes/tiny/config.json").read_text())
    assert "4097 tokens" in mistake(tokenizer_of, model) and "4097 tokens" in mistake(tokenizer_of, model, model)


def test_random_weights_have_no_tokenizer_of_their_own(tokenizer_of, changed, model):
    given = changed(swap("<|im_end|>", "<|endoftext|>"))
    assert tokenizer_of(model, given, from_scratch=True).eos_token == "<|im_end|>"
    # Nor has a model that came without one.
    assert tokenizer_of("recipes/tiny", given).eos_token == "<|im_end|>"


# ---- files -------------------------------------------------------------------------------------------------------
def test_a_model_without_a_tokenizer_and_none_named(tokenizer_of, mistake):
    message = mistake(tokenizer_of, "recipes/tiny")
    assert "model.tokenizer_name_or_path" in message and "no tokenizer at" in message and "python-docs" in message


@pytest.mark.parametrize("kind", ["gemma2", "cohere", "qwen3", "gpt2", "gpt_neox", "t5"])
def test_a_tokenizer_that_transformers_makes_up(tokenizer_of, mistake, own, kind, tmp_path):
    """Of a few special tokens: no text would have a token. It takes no other tokenizer's place either."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": len(own)}))
    message = mistake(tokenizer_of, str(tmp_path))
    assert "no tokenizer at" in message and "makes one up" in message and "python-docs" in message
    assert len(tokenizer_of(str(tmp_path), "python-docs")) == len(own)


def test_a_directory_that_holds_none(tokenizer_of, mistake, model, tmp_path):
    (tmp_path / "empty").mkdir()
    message = mistake(tokenizer_of, model, str(tmp_path / "empty"))
    assert "no tokenizer at" in message and "'" + str(tmp_path / "empty") + "'" in message


def test_a_tokenizer_without_padding_and_end_is_told(tokenizer_of, mistake, model, own, tmp_path):
    """It would end the run in its first micro-batch."""
    folder = tmp_path / "endless"
    own.save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("eos_token", "pad_token")}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    message = mistake(tokenizer_of, model, str(folder), from_scratch=True)
    assert "model.tokenizer_name_or_path" in message and repr(str(folder)) in message
    assert "pad_token, eos_token" in message and '"eos_token": "<|im_end|>"' in message.splitlines()[-1]


def test_padding_is_the_end_where_there_is_no_padding_token(tokenizer_of, model, own, save):
    bare = copy.deepcopy(own)
    bare.pad_token = None
    assert tokenizer_of(model, save(bare, "bare")).pad_token == "<|im_end|>"

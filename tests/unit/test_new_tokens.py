"""Tokens that a recipe adds: rows that begin as means, in whatever files a model has; refused where they would not be trained."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from brigade.errors import UserError
from brigade.plan.choice.job_of_recipe import job_of
from brigade.train.data.encode import LoadedEncoder
from brigade.train.data.prepare import prepare
from brigade.train.data.rows import RowChunk
from brigade.train.data.tokenise import encoder_of
from brigade.train.model import adapters, load
from brigade.train.model.location import load_config
from brigade.train.model.new_tokens import describe, read_tokenizer
from brigade.train.model.tokenizer import load_tokenizer, vocabulary
from brigade.train.recipe import flags
from testing.ranks import REPOSITORY
from testing.runs import write_model

NEW = ["--add_tokens", "<call>,</call>", "--add_special_tokens", "<|tool|>"]
ROWS = ["--use_peft", "--trainable_token_indices", "<call>,</call>,<|tool|>"]


@pytest.fixture
def settings_of(folder, own_cache):
    """settings_of("llama", *words): of a model of 4096 tokens, as many as its tokenizer has."""

    def settings(model, *words):
        return flags.load(
            ["--model_name_or_path", str(write_model(folder / model, model)), "--from_scratch", "false", *words]
        )

    return settings


def grown(settings):
    config = load_config(settings)
    return load.load_model(settings, load.weights(settings, config), torch.float32, "sdpa"), config


def test_new_rows_are_means_and_all_others_stay(settings_of, folder):
    settings = settings_of("llama", *NEW)
    model, config = grown(settings)
    tokenizer = load_tokenizer(settings, config.vocab_size)
    said = "3 of 3 that the recipe names (<call>, </call>, <|tool|>), whose rows begin as the mean of 4,096 others"
    assert describe(settings, str(folder / "llama")) == {"new tokens": said}
    assert vocabulary(settings) == config.vocab_size == model.config.vocab_size == 4160
    assert tokenizer.convert_tokens_to_ids(["<call>", "</call>", "<|tool|>"]) == [4096, 4097, 4098]
    assert tokenizer("a <call>b</call><|tool|>")["input_ids"].count(4096) == 1
    assert tokenizer.decode([4096, 4098], skip_special_tokens=True) == "<call>"
    before = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    for get in ("get_input_embeddings", "get_output_embeddings"):
        old, new = (getattr(each, get)().weight.detach() for each in (before, model))
        assert torch.equal(new[:4096], old) and new.shape[0] == 4160
        torch.testing.assert_close(new[4096:], old.mean(0).expand(64, -1), rtol=1e-5, atol=1e-8)
        assert torch.equal(new[4096], new[4159])


def test_models_of_several_files_keep_those_without_an_end(settings_of, folder, tmp_path):
    """And rows that a model has to spare are used first: the others keep their values."""
    model = AutoModelForCausalLM.from_pretrained(write_model(folder / "qwen3", "qwen3"), dtype=torch.bfloat16)
    model.resize_token_embeddings(4100)
    model.get_input_embeddings().weight.data[4096:] = 7
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_bytes((folder / "qwen3" / name).read_bytes())
    model.save_pretrained(tmp_path / "model", max_shard_size="300KB")
    settings = settings_of("qwen3", *NEW, "--model_name_or_path", str(tmp_path / "model"))
    config = load_config(settings)
    assert config.vocab_size == 4100
    made = Path(load.weights(settings, config))
    files = sorted(tmp_path.glob("model/*.safetensors"))
    written = [file.name for file in files if not (made / file.name).is_symlink()]
    assert len(files) == 3 and len(written) == 2, "one has only layers"
    rows = load.load_model(settings, str(made), torch.bfloat16, "sdpa").get_input_embeddings().weight
    mean = model.get_input_embeddings().weight[:4096].double().mean(0).bfloat16()
    assert torch.equal(rows[4096:4099], mean.expand(3, -1)) and (rows[4099] == 7).all()
    (made / "config.json").unlink()  # a process that was killed
    assert load.weights(settings, config) == str(made) and (made / "config.json").is_file()
    assert load.weights(settings_of("qwen3", *NEW), load_config(settings_of("qwen3", *NEW))) != str(made)


def test_biases_grow_and_a_reward_model_has_no_output_layer(settings_of, folder):
    before = AutoModelForCausalLM.from_pretrained(write_model(folder / "phi", "phi"), dtype=torch.float32)
    bias = grown(settings_of("phi", *NEW))[0].lm_head.bias
    assert bias.shape == (4160,) and torch.equal(bias[:4096], before.lm_head.bias)
    assert bias[4100].item() == pytest.approx(before.lm_head.bias.mean().item(), abs=1e-8)
    model, _ = grown(settings_of("llama", *NEW, "--objective", "reward"))
    assert model.get_input_embeddings().weight.shape[0] == 4160 and model.score.weight.shape[0] == 1


def test_tokens_that_are_there_change_nothing(settings_of, folder):
    settings = settings_of("llama", "--add_special_tokens", "<|im_start|>")
    config = load_config(settings)
    assert describe(settings, str(folder / "llama"))["new tokens"].startswith("none")
    assert config.vocab_size == 4096 and load.weights(settings, config) == str(folder / "llama")


@pytest.mark.parametrize("words, reason", [
    (["--add_tokens", "the"], "'the' is in the vocabulary (id 673)"),
    (["--add_special_tokens", "return"], "'return' is in the vocabulary"),
    (["--add_tokens", "ing"], "'ing' is in the vocabulary"),
    (["--add_tokens", "Ġthe"], "'Ġthe' is in the vocabulary"),  # how " the" is spelled there
    (["--add_tokens", "é"], "'é' is in the vocabulary"),  # how a byte is
    (["--add_tokens", "<|im_start|>user"], "holds '<|im_start|>'"),
    (["--add_tokens", "<a>", "--add_special_tokens", "<a>"], "stands in add_tokens, too"),
    (["--add_tokens", "x<a>", "--add_special_tokens", "<a>"], "never writes 'x<a>'"),  # special ones are cut out first
    (["--add_tokens", "The"], "'The' is in the vocabulary"),
    (["--add_tokens", "<\udced\udca0>"], "in UTF-8, without half a surrogate pair"),  # a flag's bytes that are no letter
    (["--add_special_tokens", '["<\\ud83d>"]'], "in UTF-8, without half a surrogate pair"),
    (["--trainable_token_indices", "\udc80"], "in UTF-8, without half a surrogate pair"),
])  # fmt: skip
def test_a_token_that_would_change_how_other_text_is_read_is_refused(settings_of, folder, words, reason):
    with pytest.raises(UserError, match=re.escape(reason)) as refused:
        read_tokenizer(settings_of("llama", *words), str(folder / "llama"))
    assert str(refused.value.place).endswith(tuple(words[::2]))


def test_a_letter_that_json_writes_as_two_escapes_is_one(settings_of):
    assert settings_of("llama", "--add_tokens", '["\\ud83d\\ude00"]').recipe.model.add_tokens == ["\U0001f600"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """small(kind, token): what is wrong with it as a new token of a tokenizer with the words the, th and a; "" for nothing."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizers")
    letters = {
        word: number for number, word in enumerate(("?", "</s>", *"▁aheinTtg", "th", "the", "▁the", "##ing", "<0x41>"))
    }
    pieces = models.BPE(letters, [("t", "h"), ("th", "e"), ("▁", "the")], unk_token="?")
    with_blanks = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    unigram = models.Unigram([(word, -float(number)) for word, number in letters.items()], unk_id=0)
    kinds = {
        "pieces": (pieces, with_blanks, None, decoders.Replace("▁", " ")),
        "unigram": (unigram, None, pre_tokenizers.Metaspace(), decoders.Metaspace()),
        "small letters": (models.WordPiece(letters, unk_token="?"), normalizers.BertNormalizer(lowercase=True),
                          pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()),
        "words": (models.WordLevel(letters, unk_token="?"), None, pre_tokenizers.Whitespace(), None),
    }  # fmt: skip
    for kind, (model, normalizer, splits, decoder) in kinds.items():
        made = Tokenizer(model)
        for name, part in {"normalizer": normalizer, "pre_tokenizer": splits, "decoder": decoder}.items():
            if part:
                setattr(made, name, part)
        made.add_special_tokens(["?", "</s>"])
        PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?", eos_token="</s>").save_pretrained(folder / kind)

    def call(kind, *tokens, key="add_tokens"):
        words = ["--tokenizer_name_or_path", str(folder / kind), f"--{key}", json.dumps(tokens)]
        try:
            read_tokenizer(flags.load(words), "")
        except UserError as error:
            return error.problem
        return ""

    return call


@pytest.mark.parametrize("kind, taken, refused", [
    ("pieces", "The THE <call> [unused1] ##in </S>", "the ▁the th t"),
    ("unigram", "The THE <call> [unused1]", "the ▁the th t"),
    ("small letters", "<call> <CALL> [unused1]", "the The THE th ##ing"),
    ("words", "The <call> thee", "the th T"),
])  # fmt: skip
def test_what_a_vocabulary_has_however_it_is_spelled_there(small, kind, taken, refused):
    for key in ("add_tokens", "add_special_tokens"):
        for token in taken.split():
            assert not small(kind, token, key=key), token
        for token in refused.split():
            assert "is in the vocabulary" in small(kind, token, key=key), token
    if kind == "small letters":
        assert "never writes" in small(kind, "<call>", "<CALL>")


def test_a_token_that_is_there_stays_what_it_is(settings_of, folder):
    tokenizer, ids = read_tokenizer(settings_of("llama", "--add_tokens", "<|im_end|>"), str(folder / "llama"))
    assert not ids and tokenizer.decode(tokenizer("a<|im_end|>")["input_ids"], skip_special_tokens=True) == "a"
    again = read_tokenizer(settings_of("llama"), str(folder / "llama"))[0]
    assert tokenizer("the then")["input_ids"] == again("the then")["input_ids"]


def test_the_recipes_own_tokens_are_meant_in_all_roles(settings_of, folder):
    """And those that the template writes stay what nobody can spell out."""
    chat = ["--chat_template", "chatml", "--add_special_tokens", "<|tool|>,<|im_end|>"]
    settings = settings_of("llama", *chat)
    tokenizer, (number,) = read_tokenizer(settings, str(folder / "llama"))
    loaded = LoadedEncoder(encoder_of(settings, tokenizer))
    row = {"prompt": "<|tool|> is what?<|im_end|>.", "completion": "It is <|tool|>"}
    found = loaded.encode(RowChunk([row], "here", 1, 1, None), {})
    assert not found.bad and found.tokens.tolist().count(number) == 2
    assert found.tokens.tolist().count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2
    assert found.samples["plain"].tolist() == [1] and found.samples["control"].tolist() == [0]
    roles = ("system", "user", "assistant", "tool", "assistant")
    chat = [{"role": role, "content": f"<|tool|>{role}<|tool|>"} for role in roles]
    chat[2]["tool_calls"] = [{"function": {"name": "f", "arguments": {"x": "<|tool|>"}}}]
    qwen = settings_of("llama", "--chat_template", "qwen3", "--add_special_tokens", "<|tool|>,<tool_response>")
    tokenizer, _ = read_tokenizer(qwen, str(folder / "llama"))
    loaded = LoadedEncoder(encoder_of(qwen, tokenizer))
    pair = {"prompt": "<|tool|>", "completion": "<|tool|>"}
    for row, count in ({"messages": chat}, 11), (pair, 2), ({"text": "<|tool|>a<|tool|>"}, 2):
        found = loaded.encode(RowChunk([row], "here", 1, 1, None), {})
        assert not found.bad and found.tokens.tolist().count(number) == count, found.bad or row
        assert found.samples["plain"].tolist() == [0] and found.samples["control"].tolist() == [0]
        assert not any("read as letters" in words for words in itertools.chain(*found.unread))


def test_a_token_that_is_there_and_that_the_recipe_adds_makes_other_data(settings_of, tmp_path):
    """Spelled out by a user it is a text, unless the recipe says that it is meant."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "<|im_start|> is what?", "completion": "a"}) + "\n")
    words = ["--chat_template", "tulu", "--dataset_name", "null", "--train_file", str(file), "--validation_file"]
    (tmp_path / "held.jsonl").write_text('{"prompt": "b", "completion": "c"}\n')
    counts = []
    for more in ([], ["--add_special_tokens", "<|im_start|>"]):
        settings = settings_of("llama", *words, str(tmp_path / "held.jsonl"), *more)
        tokenizer = load_tokenizer(settings, 4096)
        number = tokenizer.convert_tokens_to_ids("<|im_start|>")
        counts.append(prepare(settings, tokenizer).train[0]["input_ids"].tolist().count(number))
    assert counts == [0, 1]


@pytest.mark.parametrize("words, named", [
    ([], "'<call>', '</call>', '<|tool|>'"),
    (["--trainable_token_indices", "<call>,300"], "'</call>', '<|tool|>'"),
    (["--lora_modules_to_save", "lm_head"], "'<call>', '</call>', '<|tool|>'"),
])  # fmt: skip
def test_adapters_that_would_leave_new_rows_untrained_are_refused(words, named, settings_of):
    settings = settings_of("llama", *NEW, "--use_peft", *words)
    with pytest.raises(UserError, match="would stay a mean of other tokens") as refused:
        adapters.check_targets(settings, load_config(settings))
    assert refused.value.cure == f"add {named} to trainable_token_indices, which trains their rows"


@pytest.mark.parametrize("words", [ROWS, ["--use_peft", "--lora_modules_to_save", "embed_tokens,lm_head"]])
def test_adapters_beside_which_new_rows_are_trained_are_not(words, settings_of):
    settings = settings_of("llama", *NEW, *words, "--lora_target_modules", "q_proj")
    adapters.check_targets(settings, load_config(settings))


def test_what_cannot_grow_is_refused(settings_of, folder, mistake):
    settings = settings_of("gemma3n_text", *NEW)
    assert "further weights for each token" in mistake(lambda: load.weights(settings, load_config(settings)))
    assert "each once" in mistake(settings_of, "llama", "--add_tokens", "<a>,<a>")
    settings = settings_of("llama", *NEW)
    whole = folder / "llama" / "model.safetensors"
    torch.save(load_file(whole), folder / "llama" / "pytorch_model.bin")
    aside = whole.rename(folder / "aside")
    with pytest.raises(UserError, match=r"no \*\.safetensors"):
        load.weights(settings, load_config(settings))
    aside.rename(whole)


def test_plan_counts_the_rows(tmp_path):
    recipe = yaml.safe_load((REPOSITORY / "recipes/qwen3-8b/full.yaml").read_text())
    (tmp_path / "full.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "config.json").write_bytes((REPOSITORY / "recipes/qwen3-8b/config.json").read_bytes())
    recipe["model"]["add_tokens"] = ["<call>", "</call>"]
    (tmp_path / "grown.yaml").write_text(yaml.safe_dump(recipe))
    jobs = (job_of(flags.load(["--recipe", str(tmp_path / name)])) for name in ("full.yaml", "grown.yaml"))
    plain, grown = (job.shape for job in jobs)
    assert (plain.vocab, grown.vocab) == (151936, 152000) and grown.parameters - plain.parameters == 2 * 64 * 4096

"""Tokenizers of strangers that grow, backtrack or wait are refused before this process loads them; honest ones are not. And
adapters of strangers, which PEFT would build and import what they name."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from brigade.train.data import probe_tokenizer, stream, tokenizer_trial
from brigade.train.data.chat_template import ChatTemplates
from brigade.train.data.encode import Encoder, LoadedEncoder
from brigade.train.data.json_rows import JsonLines
from brigade.train.data.sources import Origin
from brigade.train.data.writer import Writer
from brigade.train.model import adapters
from brigade.train.model.load import load_base, weights
from brigade.train.model.load_trained import load_trained
from brigade.train.model.location import load_config
from brigade.train.model.sizes import half_or_full
from brigade.train.recipe import flags

SIXTEENFOLD = [("abcdefghi"[n], "bcdefghij"[n] * 16) for n in range(9)]
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split(pattern: str):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def replacements(kind, pairs):
    return kind.Sequence([kind.Replace(*pair) for pair in pairs])


GROWING = {
    "nine replacements": ("normalizer", replacements(normalizers, SIXTEENFOLD)),
    "of one word only": ("normalizer", replacements(normalizers, [("qz", "b" * 16), *SIXTEENFOLD[1:]])),
    "nested": ("normalizer", normalizers.Sequence([normalizers.NFC(), replacements(normalizers, SIXTEENFOLD)])),
    "patterns": ("normalizer", replacements(normalizers, [(Regex("."), "xx")] * 20)),
    "prepended": ("normalizer", normalizers.Sequence([normalizers.Prepend("y" * 100)] * 100)),
    "bytes of bytes": ("normalizer", normalizers.Sequence([normalizers.ByteLevel()] * 14)),
    "around": ("post_processor", processors.TemplateProcessing("a:0 " * 5000 + "$A", special_tokens=[("a", 0)])),
    "decoded": ("decoder", replacements(decoders, SIXTEENFOLD[:4])),
}
BACKTRACKING = {
    "plus of plus": ("pre_tokenizer", split("(a+)+$")),
    "in a normalizer": ("normalizer", normalizers.Replace(Regex("(x+x+)+y"), "a")),
}
TWICE = Regex("z(?=z*[q][w])"), "zz"
# Of texts that the probe does not think of, and some rows have.
OF_WORDS = {
    "grows": (
        "normalizer",
        normalizers.Sequence([normalizers.Replace(*TWICE)] * 30),
        "so zzqw ",
        "its normalizer makes",
    ),
    "at once": (
        "normalizer",
        normalizers.Replace(TWICE[0], "v" * 9000),
        "zqw" * 9000,
        "this row take it more than 1 s",
    ),
    "holds": (
        "pre_tokenizer",
        split("x[yz]*[yz]*[yz]*[yz]*w"),
        ("x" + "y" * 100) * 320,  # 5 s on a core of 2026
        "this row take it more than 1 s",
    ),
}
HONEST = {
    "cl100k": ("pre_tokenizer", pre_tokenizers.Sequence([split(CL100K), pre_tokenizers.ByteLevel(use_regex=False)])),
    "llama 2": ("normalizer", normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
    "ligatures": ("normalizer", replacements(normalizers, [("…", "..."), ("œ", "oe"), ("ß", "ss"), ("½", " 1/2 ")])),
    "deep": ("normalizer", normalizers.Sequence([normalizers.Sequence([normalizers.NFC()])] * 9)),
}


def tokenizer(part: str = "decoder", value=None) -> Tokenizer:
    made = Tokenizer(models.BPE({letter: n for n, letter in enumerate("abcdefghijklmnopqrstuvwxyz!")}, []))
    if value is not None:
        setattr(made, part, value)
    return made


@pytest.fixture
def in_process(monkeypatch):
    """Try it in this process, which takes a tenth of the time: for what its limits do not have to end."""

    def run(command, **how):
        return subprocess.CompletedProcess(command, 0, probe_tokenizer.main(command[-1]), "")

    monkeypatch.setattr(tokenizer_trial.subprocess, "run", run)
    monkeypatch.setattr(probe_tokenizer, "SIZE", 2**10)


def test_what_grows_or_backtracks_is_refused(in_process, tmp_path, mistake):
    for name, made in (GROWING | BACKTRACKING).items():
        tokenizer(*made).save(str(tmp_path / "tokenizer.json"))
        said = mistake(tokenizer_trial.check, tmp_path, "a key")
        wanted = "it fails at" if name in BACKTRACKING else " of "
        assert "is not used" in said and wanted in said, (name, said)


def test_honest_ones_are_taken_and_remembered(in_process, tmp_path, monkeypatch):
    for made in HONEST.values():
        tokenizer(*made).save(str(tmp_path / "tokenizer.json"))
        tokenizer_trial.check(tmp_path, "a key")
    monkeypatch.setattr(tokenizer_trial, "_tried", None)
    tokenizer_trial.check(tmp_path, "a key")


def test_plain_ones_need_no_trial(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_trial.subprocess, "run", None)
    tokenizer("pre_tokenizer", pre_tokenizers.ByteLevel()).save(str(tmp_path / "tokenizer.json"))
    tokenizer_trial.check(tmp_path, "a key")


def test_limits_of_memory_and_files_of_other_names(tmp_path, mistake, monkeypatch):
    """An added token is normalised as it is loaded: what the library does then ends its process."""
    document = json.loads(tokenizer(*GROWING["nine replacements"]).to_str())
    token = {"id": 27, "content": "aa", "single_word": False, "lstrip": False, "rstrip": False}
    document["added_tokens"] = [token | {"normalized": True, "special": False}]
    (tmp_path / "tokenizer.4.0.0.json").write_text(json.dumps(document))
    (tmp_path / "tokenizer_config.json").write_text('{"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}')
    script = tmp_path / "probe.py"
    own = Path(probe_tokenizer.__file__).read_text()
    script.write_text(own.replace("MEMORY = 3 * 2**29", "MEMORY = 2**27"))
    monkeypatch.setattr(probe_tokenizer, "__file__", str(script))
    assert "memory allocation" in mistake(tokenizer_trial.check, tmp_path, "a key")


def test_first_rows_are_tried_where_time_and_memory_are_limited(tmp_path, mistake, monkeypatch):
    monkeypatch.setattr(probe_tokenizer, "SECONDS", 1)
    monkeypatch.setattr(probe_tokenizer, "MEMORY", 2**26)
    path = tmp_path / "x.jsonl"
    for name, (part, made, text, wanted) in OF_WORDS.items():
        path.write_text("".join(json.dumps({"turns": [{"says": each}]}) + "\n" for each in ("b \ud800", text, "c")))
        chunk = next(JsonLines([path]).chunks())
        said = mistake(tokenizer_trial.check_rows, tokenizer(part, made), chunk)
        assert f"{path}, line 2" in said and wanted in said, (name, said)


def test_a_streamed_source_is_tried_on_what_it_trains_on(tmp_path, mistake, monkeypatch):
    """Its held-out split may be another file, and the rest is tokenised while ranks wait for it."""
    monkeypatch.setattr(probe_tokenizer, "SECONDS", 1)
    part, made, text, wanted = OF_WORDS["grows"]
    encoder = Encoder(tokenizer(part, made).to_str(), ChatTemplates("", joins=True), {}, 0, 64, True)
    train, heldout = tmp_path / "train.jsonl", tmp_path / "heldout.jsonl"
    train.write_text(json.dumps({"text": text}) + "\n")
    heldout.write_text(json.dumps({"text": "b"}) + "\n")
    origin = Origin("", JsonLines([train]), JsonLines([heldout]), {}, None)
    settings = flags.load(["--recipe", "recipes/tiny/full.yaml"])
    said = mistake(stream.hold_out, settings, encoder, [origin], Writer(tmp_path))
    assert f"{train}, line 1" in said and wanted in said


def test_honest_tokenizers_take_all_rows(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [
        {"text": "é" * 2**16},
        {"text": ""},
        {"n": [1, None]},
        ["x"],
        "",
        {"text": "\ud800 ﷺ" * 4000},
        *[{"t": "ab "}] * 99,
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken")
    for made in HONEST.values():
        tokenizer_trial.check_rows(tokenizer(*made), next(JsonLines([path]).chunks()))


def test_a_panic_names_its_row_and_the_question(tmp_path, mistake):
    made = tokenizer("pre_tokenizer", split("(a+)+$")).to_str()
    encoder = LoadedEncoder(Encoder(made, ChatTemplates("", joins=True), {}, 0, 64, True))
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("b", "a" * 40 + "!", "c")))
    said = mistake(encoder.encode, next(JsonLines([path]).chunks()), {})
    assert f"{path}, line 2" in said and "the tokenizer fails at it: Onig" in said
    assert "retry-limit" in mistake(encoder.beginning, "a" * 40 + "!")


# ---- adapters --------------------------------------------------------------------------------------------------------
FILE, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
STRANGE = {  # what is changed, and what the error names
    "another kind, with a tokenizer's own code": (
        {"peft_type": "PROMPT_TUNING", "prompt_tuning_init": "TEXT", "tokenizer_kwargs": {"trust_remote_code": True}},
        "peft_type",
    ),
    "no kind": ({"peft_type": None}, "peft_type"),
    "a kind that is no text": ({"peft_type": [1]}, "peft_type"),
    "a module to import": ({"megatron_config": {"a": 1}, "megatron_core": "loss"}, "megatron_config"),
    "another scale": ({"lora_alpha": 999}, "999.0, but the run had 32"),
    "a rank without end": ({"r": 10**9}, "1000000000, but the run had 16"),
    "a rank that is none": ({"r": "8 "}, "r"),
    "another method": ({"use_dora": True}, "use_dora"),
    "ranks by a pattern": ({"rank_pattern": {".*": 1}}, "rank_pattern"),
    "a pattern of targets": ({"target_modules": "(m*)*(o*)*x"}, "no list of names"),
    "layers without end": ({"layer_replication": [[0, 10**6]]}, "layer_replication"),
    "another start": ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    "targets that are not there": ({"target_modules": ["nothing"]}, "do not fit their base"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """saved(settings): a directory with adapters as a run of these settings leaves them."""
    folder = tmp_path_factory.mktemp("saved")

    def save(settings):
        if not (folder / FILE).exists():
            source = weights(settings, load_config(settings))
            base = load_base(settings, source, half_or_full(settings))
            adapters.wrap(base, settings, source).save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def settings(load):
    return load("--from_scratch", "true", "--use_peft", "true", "--max_length", "1024")


@pytest.mark.parametrize("change, says", STRANGE.values(), ids=STRANGE)
def test_adapters_of_another_kind_than_the_runs_are_refused(saved, settings, tmp_path, mistake, change, says):
    folder = shutil.copytree(saved(settings), tmp_path / "run")
    document = json.loads((folder / FILE).read_text()) | change
    (folder / FILE).write_text(json.dumps(document))
    assert says in mistake(lambda: load_trained(settings, folder))


def test_adapters_as_the_run_left_them_are_loaded_and_damaged_ones_refused(saved, settings, tmp_path, mistake):
    folder = shutil.copytree(saved(settings), tmp_path / "run")
    assert load_trained(settings, folder).peft_config["default"].r == 16
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-64])
    assert "damaged" in mistake(lambda: load_trained(settings, folder))

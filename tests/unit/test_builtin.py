"""Tests of the built-in data set and its tokenizer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brigade.train.data import builtin, python_docs

ROOT = Path(__file__).parents[2]
ENSURE = """import sys; from pathlib import Path; from brigade.train.data.builtin import ensure
print(ensure(Path(sys.argv[1])).train)"""


def start(cache: Path, **environment: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", ENSURE, str(cache)], env=environment, stdout=subprocess.PIPE, text=True
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return builtin.ensure(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def chats(built):
    def read(path):
        return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]

    return read(built.train), read(built.heldout)


@pytest.fixture(scope="module")
def tokenizer(built):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(built.tokenizer)


def names(chats):
    return {user["content"].split("`")[1] for user, _ in chats}


def test_later_calls_only_look(built, monkeypatch):
    monkeypatch.setattr(python_docs, "_sources", lambda: pytest.fail("built again"))
    assert builtin.ensure(built.train.parents[1]) == built


def test_concurrent_builds_agree_with_each_other_and_with_an_earlier_one(built, tmp_path):
    # Other hash seeds, too: nothing may depend on the order of a set.
    processes = [start(tmp_path / "cache", PYTHONHASHSEED=seed) for seed in ("1", "2")]
    outputs = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert [path.name for path in (tmp_path / "cache").glob("*/")] == [built.train.parent.name]
    assert contents(Path(outputs[0]).parent) == contents(built.train.parent)


def test_a_failed_build_leaves_nothing(tmp_path, monkeypatch):
    def fail(paths, *_):
        paths.train.write_text("half")
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(python_docs, "_build", fail)
    with pytest.raises(RuntimeError, match="disk on fire"):
        builtin.ensure(tmp_path)
    assert not list(tmp_path.glob("*/"))


def test_importing_stays_light():
    code = "import sys, brigade.train.data.builtin; sys.exit(bool({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_no_sources_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(python_docs.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="sources of the standard library"):
        builtin.ensure(tmp_path / "cache")


def test_sizes(chats):
    train, heldout = chats
    assert 6_000 <= len(train) <= 12_000
    assert 200 <= len(heldout) <= 800


def test_each_chat_is_one_question_and_one_answer(chats):
    for user, assistant in chats[0] + chats[1]:
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        assert user.keys() == assistant.keys() == {"role", "content"}
        assert "`" in user["content"]
        assert python_docs.SHORTEST <= len(assistant["content"]) <= python_docs.LONGEST
        assert assistant["content"] == assistant["content"].strip()


def test_the_split_is_disjoint_in_names_and_answers(chats):
    train, heldout = chats
    assert not names(train) & names(heldout)
    answers = [assistant["content"] for _, assistant in train + heldout]
    assert len(answers) == len(set(answers))


def test_the_library_is_covered(chats):
    everything = names(chats[0] + chats[1])
    assert {"shutil.copytree", "math.sqrt", "itertools.chain", "asyncio", "json.dumps", "str.join", "len"} <= everything
    assert not {name for name in everything if name.startswith(("test.", "idlelib", "lib2to3", "_"))}


def test_a_signature_is_written_as_called(chats):
    answers = [assistant["content"] for _, assistant in chats[0] + chats[1]]
    assert any(answer.startswith("`shutil.copytree(src, dst, symlinks=False,") for answer in answers)
    assert any(answer.startswith("`threading.Thread(group=None, target=None,") for answer in answers)


@pytest.mark.parametrize(
    ("text", "longest", "short"),
    [
        ("Short.", 40, "Short."),
        ("One.\n\nTwo is rather longer.", 12, "One."),
        ("One. Two is here. Three is not.", 20, "One. Two is here."),
        ("No end of a sentence in reach here", 10, ""),
        ("One.\n\nFor example:\n\n    and so on and on", 24, "One."),
        ("Ends here.\n\nNext.", 10, "Ends here."),
        ("It ends here. Next.", 13, "It ends here."),
        ("It ends here. Next.", 12, ""),
        ("Usage:", 40, ""),
    ],
)
def test_shorten(text, longest, short):
    assert python_docs._shorten(text, longest) == short


@given(st.text(alphabet="ab.:\n ", max_size=60), st.integers(1, 40))
def test_shorten_returns_a_prefix_within_the_limit(text, longest):
    short = python_docs._shorten(text, longest)
    assert len(short) <= longest
    assert text.strip().startswith(short)


def test_vocabulary_and_special_tokens(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 4096
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.unk_token is None
    assert {"<|endoftext|>", "<|im_start|>", "<|im_end|>"} == set(tokenizer.all_special_tokens)
    assert tokenizer.model_max_length >= 1 << 20
    assert tokenizer.chat_template.strip() == builtin.TEMPLATE.read_text().strip()


@given(st.text())
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_template_writes_chatml(tokenizer):
    messages = [{"role": role, "content": role[:3]} for role in ("system", "user", "assistant")]
    text = "<|im_start|>system\nsys<|im_end|>\n<|im_start|>user\nuse<|im_end|>\n"
    turn = "<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == f"{text}{turn}ass<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True) == text + turn


def test_the_template_refuses_unknown_roles(tokenizer):
    with pytest.raises(Exception, match="unknown role: tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "?"}], tokenize=False)


def test_the_mask_marks_exactly_the_tokens_of_the_assistant(tokenizer, chats):
    for first, second in zip(chats[1][:100], chats[1][100:200], strict=True):
        messages = [{"role": "system", "content": "Be brief."}, *first, *second]
        encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        marked = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
        assert tokenizer.decode(marked) == "".join(chat[1]["content"] + "<|im_end|>" for chat in (first, second))

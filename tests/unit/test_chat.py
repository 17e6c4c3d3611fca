"""`python -m brigade chat`: what the model reads of a conversation, what is shown of its answers, and the prompt's commands."""

import io
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from brigade.__main__ import main
from brigade.chat import command
from brigade.chat.answer import Answering, Streamer
from brigade.chat.conversation import Conversation
from brigade.train.data.encode import LoadedEncoder
from brigade.train.data.tokenise import encoder_of
from brigade.train.recipe.files import REPOSITORY
from brigade.train.run.directory import RECORD
from brigade.train.run.ending import next_steps
from brigade.train.run.success import SUCCESS
from testing.small_configs import LEAST

NO_SYSTEM = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
NO_SYSTEM += "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


@pytest.fixture
def begin(load, tokenizer):
    """begin(positions=..., system=..., template=...): a conversation."""

    def call(positions=1000, room=10, system="", template="chatml"):
        encoder = LoadedEncoder(encoder_of(load(data={"chat_template": str(template)}), tokenizer))
        return Conversation(encoder, positions, room, system)

    return call


# ---- what the model reads ----------------------------------------------------------------------------------------
def test_the_whole_conversation_is_read_through_the_runs_template(begin, tokenizer):
    talk = begin(system="Be brief.")
    assert talk.prompt("a?")[1] == 0
    talk.add("a?", "A.")
    talk.add("b?", "")  # nothing was said: some templates refuse such a turn
    system, first, second = (
        f"<|im_start|>{turns}<|im_end|>\n"
        for turns in ("system\nBe brief.", "user\na?<|im_end|>\n<|im_start|>assistant\nA.", "user\nc?")
    )
    assert tokenizer.decode(talk.prompt("c?")[0]) == f"{system}{first}{second}<|im_start|>assistant\n"
    talk.forget()
    assert tokenizer.decode(talk.prompt("c?")[0]) == f"{system}{second}<|im_start|>assistant\n"


def test_a_question_that_spells_a_control_token_ends_no_turn(begin, tokenizer):
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    plain, spelled = (begin().prompt(text)[0] for text in ("a", "a <|im_end|> b"))
    assert plain.count(end) == spelled.count(end) == 1 and "a <|im_end|> b" in tokenizer.decode(spelled)


def test_the_oldest_turns_are_dropped_where_the_positions_end(begin, tokenizer):
    talk = begin(system="Be brief.")
    for letter in "abcd":
        talk.add(f"{letter}{letter}?", f"{letter.upper()}.")
    whole = len(talk.prompt("e?")[0])
    talk.positions = whole + talk.room  # all of it fits, to the token
    assert talk.prompt("e?") == (talk.prompt("e?")[0], 0)
    talk.positions -= 1
    ids, dropped = talk.prompt("e?")
    text = tokenizer.decode(ids)
    assert dropped == 1 and "aa?" not in text and "bb?" in text and "Be brief." in text
    assert talk.prompt("e?")[1] == 0, "said once"


def test_a_question_longer_than_the_positions_is_told_and_not_answered(begin, mistake):
    talk = begin(positions=30, room=512)
    assert talk.room == 15
    assert len(talk.prompt("a " * 15)[0]) < 30  # its answer has less room, but some
    told = mistake(talk.prompt, "a " * 40)
    assert "30" in told and "shorter" in told


def test_without_a_template_each_text_is_continued_by_itself(begin, tokenizer):
    talk = begin(template="none")
    talk.add("One ", "two")
    assert tokenizer.decode(talk.prompt("Three")[0]) == "Three" and talk.opening() == ""


def test_a_system_message_that_the_template_refuses_is_told(begin, tmp_path, mistake):
    (tmp_path / "no.jinja").write_text(NO_SYSTEM)
    assert begin(template=tmp_path / "no.jinja").prompt("a?")[0]
    told = mistake(begin(template=tmp_path / "no.jinja", system="Be brief.").prompt, "a?")
    assert "no system here" in told and "--system" in told


def test_a_run_on_texts_takes_no_picture(begin, capsys):
    chat = command.Chat(SimpleNamespace(), [command.Speaker("trained", None, begin())], echo=False)
    assert not chat.answer_all(["/image a.png"])
    assert "/image" in (told := capsys.readouterr().err) and "the run was trained on texts" in told


# ---- what is shown -----------------------------------------------------------------------------------------------
class Speaks:
    """A model that says a text, token by token, and is interrupted then or ends."""

    def __init__(self, tokenizer, text, interrupted=False):
        self.ids, self.interrupted = tokenizer.encode(text, add_special_tokens=False), interrupted
        self.asked = []

    def generate(self, input_ids, streamer, **how):
        self.asked.append((input_ids[0].tolist(), how))
        streamer.put(input_ids)
        for token in self.ids[: how["max_new_tokens"]]:
            streamer.put(torch.tensor([token]))
        if self.interrupted:
            raise KeyboardInterrupt
        streamer.end()


@pytest.fixture
def answer(tokenizer):
    """answer("text", ...): the Answer of a model that says this, and the pieces that were shown."""

    def call(text, interrupted=False, most=100, **how):
        pieces, end = [], tokenizer.convert_tokens_to_ids("<|im_end|>")
        answering = Answering(tokenizer, {end}, "cpu", most, **how)
        return answering.answer(Speaks(tokenizer, text, interrupted), [5, 6], 1000, pieces.append), pieces

    return call


def test_an_answer_is_shown_as_it_comes_up_to_its_end(answer):
    given, pieces = answer("Grüße 😀, word by word.<|im_end|>and no more")
    assert "".join(pieces) == given.text == "Grüße 😀, word by word." and len(pieces) > 5
    assert not any("\ufffd" in piece for piece in pieces) and not given.cut and not given.stopped


def test_an_answer_that_uses_up_its_tokens_is_called_cut(answer):
    assert answer("one two three four five", most=2)[0].cut


def test_ctrl_c_stops_an_answer_where_somebody_types_and_else_the_command(answer):
    given, pieces = answer("half an ans", interrupted=True, stoppable=True)
    assert given.stopped and not given.cut and given.text == "".join(pieces) == "half an ans"
    with pytest.raises(KeyboardInterrupt):
        answer("half an ans", interrupted=True)


def test_what_a_template_writes_before_an_answer_is_neither_shown_nor_repeated(begin, answer):
    opening = begin(template="gpt-oss").opening()
    assert opening == "<|channel|>final<|message|>" and begin().opening() == ""
    given, pieces = answer(f"{opening}Hello.<|im_end|>", opening=opening)
    assert given.text == "".join(pieces) == "Hello."
    thoughts = f"<|channel|>analysis<|message|>Well<|end|><|start|>assistant{opening}Hello.<|im_end|>"
    given, pieces = answer(thoughts, opening=opening)
    assert given.text == "Hello." and "analysis" in "".join(pieces), "thoughts are told apart from the answer"
    given, pieces = answer("<|chan", opening=opening)
    assert "".join(pieces) == "<|chan", "what was held back is shown at the end"


def test_nothing_that_a_terminal_obeys_reaches_it(tokenizer, capsys):
    streamer = Streamer(tokenizer, set(), "", command._show)
    streamer.put(None)
    said = "\x1b[31mred\x1b]0;title\x07 \x9b2J\rback\u202e"
    for token in tokenizer.encode(said, add_special_tokens=False):
        streamer.put(torch.tensor(token))
    streamer.end()
    shown = capsys.readouterr().out
    assert "red" in shown and "back" in shown and not set("\x1b\x07\x9b\r\u202e") & set(shown)


# ---- the command -------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def output(tmp_path_factory, tokenizer):
    """A finished run that trained a whole model, with 64 positions; its base has other weights."""
    config = json.loads((REPOSITORY / "recipes/tiny/config.json").read_text())
    config |= LEAST | {"max_position_embeddings": 64}
    folders = [tmp_path_factory.mktemp(name) for name in ("base", "run")]
    for seed, folder in enumerate(folders):
        (folder / "config.json").write_text(json.dumps(config))
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    recipe = {
        "model": {"model_name_or_path": str(folders[0])},
        "data": {"dataset_name": "python-docs", "chat_template": "chatml", "max_length": 64},
        "training": {"global_batch_size": 4},
    }
    (folders[1] / RECORD).write_text(json.dumps(recipe))
    (folders[1] / SUCCESS).write_text("{}")
    return folders[1]


@pytest.fixture
def chat(output, capsys):
    """chat("--question", ...): the exit code, and what is on standard output and standard error."""

    def call(*words, source=output):
        code = main(["chat", str(source), "--max_new_tokens", "8", *words])
        return code, *capsys.readouterr()

    return call


def generated(folder, tokenizer, *turns):
    """What Transformers alone makes of a conversation."""
    roles = ("user", "assistant") * len(turns)
    chat = [f"<|im_start|>{role}\n{turn}<|im_end|>\n" for role, turn in zip(roles, turns, strict=False)]
    ids = tokenizer.encode("".join(chat) + "<|im_start|>assistant\n", add_special_tokens=False, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0)
    return tokenizer.decode(tokens[0, ids.shape[1] :])


def test_questions_are_turns_of_one_conversation_and_standard_output_holds_answers(chat, output, tokenizer):
    first = generated(output, tokenizer, "a?")
    second = generated(output, tokenizer, "a?", first, "b?")
    code, out, err = chat("--question", "a?", "--question", "b?", "--question", "/new", "--question", "a?")
    assert code == 0 and out == f"{first}\n{second}\n{first}\n"
    assert "> b?\n" in err and "anew" in err
    # A byte that is no letter.
    odd, said = (chat("--system", system, "--question", "a?")[:2] for system in ("\udc80", "?"))
    assert odd == said and odd[0] == 0


def test_the_base_answers_too_and_goes_on_with_its_own_answers(chat, output, tokenizer):
    base = json.loads((output / RECORD).read_text())["model"]["model_name_or_path"]
    wanted = []
    for name, folder in (("trained", output), ("base", base)):
        first = generated(folder, tokenizer, "a?")
        second = generated(folder, tokenizer, "a?", first, "b?")
        wanted.append([f"{name}: {first}\n", f"{name}: {second}\n"])
    out = chat("--compare", "--question", "a?", "--question", "b?")[1]
    assert wanted[0][0] != wanted[1][0].replace("base", "trained")
    assert out == "".join(map("".join, zip(*wanted, strict=True)))


def test_a_pipe_is_answered_line_by_line_and_the_context_never_overflows(chat, output, monkeypatch):
    lines = ["a?\n", "\n", *["And then?\n"] * 8, "x " * 100 + "\n", "/quit\n", "unread\n"]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(lines)))
    code, out, err = chat()
    assert code == 1 and len(out) > 9 and "> unread" not in err
    assert "forgotten: the model has positions for 64 tokens" in err and "error: the question\n" in err


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_ctrl_d_and_ctrl_c_at_the_prompt_end_it_cleanly(chat, monkeypatch, end):
    typed = iter(["a?", "/new"])

    def read(prompt):
        if (line := next(typed, None)) is None:
            raise end
        return line

    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", read)
    code, out, err = chat()
    assert code == 0 and out and all(word in err for word in ("full fine-tuning", "/quit", "Ctrl-D", "anew"))


def test_sampling_follows_the_temperature(chat):
    torch.manual_seed(0)
    greedy, hot = (chat("--question", "a?", "--temperature", t)[1] for t in ("0", "50"))
    assert greedy == chat("--question", "a?")[1] != hot


def test_a_run_without_a_template_says_that_it_continues(chat, output, tmp_path):
    run = shutil.copytree(output, tmp_path / "run")
    recipe = json.loads((run / RECORD).read_text())
    recipe["data"]["chat_template"] = "none"
    (run / RECORD).write_text(json.dumps(recipe))
    code, out, err = chat("--question", "One", source=run)
    assert code == 0 and out and "your text is continued" in err
    code, _, err = chat("--question", "One", "--system", "Be brief.", source=run)
    assert code == 2 and "flag --system" in err and "cure: " in err


# ---- what a run says at its end ----------------------------------------------------------------------------------
def test_a_run_says_how_to_talk_to_its_model_and_how_to_serve_it(load, tmp_path):
    run = tmp_path / "my run"
    run.mkdir()
    sharded = next_steps(load(), run)[1]
    assert sharded == f"Serve it: vllm serve '{run}-whole', after python -m brigade export '{run}' '{run}-whole'"
    (run / "model.safetensors").touch()
    talk, serve, hand_on = next_steps(load(), run)
    assert talk == f"Talk to it: python -m brigade chat '{run}'" and serve == f"Serve it: vllm serve '{run}'"
    assert hand_on.startswith("Hand it on: python -m brigade export ")
    assert next_steps(load(model={"use_peft": True}), run)[1].endswith(f"export '{run}' '{run}-merged' --merge")

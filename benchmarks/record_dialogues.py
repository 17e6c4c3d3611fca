"""Record how the official chat templates render the dialogues in tests/data/dialogues.

Run as: python -m benchmarks.record_dialogues FOLDER [NAME ...]. FOLDER holds the official templates, which are not part of
this repository: each source in the JSON files names the repository, commit and path to take, the file's name in FOLDER and
its SHA-256. A template may stand in a GGUF file, or as CHAT_TEMPLATE in a Python file. Where openai-harmony or mistral-common
is installed, what these libraries of the models' makers encode is compared, too (harmony reads o200k_base.tiktoken from
$TIKTOKEN_ENCODINGS_BASE where it cannot download it).
With --check nothing is written.
"""

import argparse
import ast
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

DIALOGUES = Path(__file__).parents[1] / "tests" / "data" / "dialogues"
ANY_DAY = "1999-12-31"  # a rendering that shows it depends on a clock that the dialogue does not set


def official(text: str, dialogue: dict[str, Any], special_tokens: dict[str, str]) -> str:
    """What an official template makes of the dialogue, on the day that the dialogue names."""
    today = date.fromisoformat(dialogue.get("date", ANY_DAY))
    _compile_jinja_template(text).globals["strftime_now"] = today.strftime
    rendered, _ = render_jinja_template(
        [dialogue["messages"]],
        tools=dialogue.get("tools"),
        chat_template=text,
        **special_tokens,
        **dialogue.get("kwargs", {}),
    )
    return rendered[0]


def templates(family: dict[str, Any], folder: Path) -> dict[str, str]:
    """The text of each source of a family. Raises SystemExit where a file is missing or is another one."""
    texts = {}
    for name, source in family["sources"].items():
        path = folder / source["file"]
        if not path.is_file():
            raise SystemExit(
                f"{path} is missing: take {source['path']} of {source['repository']} at {source['commit']}"
            )
        if hashlib.sha256(path.read_bytes()).hexdigest() != source["sha256"]:
            raise SystemExit(f"{path} is not the file whose renderings are recorded (its SHA-256 differs)")
        within = {".gguf": _of_gguf, ".py": _of_python}.get(path.suffix)
        texts[name] = within(path) if within else path.read_text(encoding="utf-8")
    return texts


def _of_python(path: Path) -> str:
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and "CHAT_TEMPLATE" in ast.unparse(statement.targets[0]):
            return str(ast.literal_eval(statement.value))
    raise SystemExit(f"{path} has no CHAT_TEMPLATE")


def _of_gguf(path: Path) -> str:
    from gguf import GGUFReader

    return str(GGUFReader(path).fields["tokenizer.chat_template"].contents())


# ---- the makers' own encoders ------------------------------------------------------------------------------------
def by_harmony(dialogue: dict[str, Any]) -> str:
    """The dialogue as OpenAI's own renderer writes it for training."""
    import openai_harmony as harmony

    kwargs, messages = dialogue.get("kwargs", {}), dialogue["messages"]
    system = harmony.SystemContent.new().with_conversation_start_date(dialogue["date"])
    system = system.with_reasoning_effort(harmony.ReasoningEffort[kwargs.get("reasoning_effort", "medium").upper()])
    if "model_identity" in kwargs:
        system = system.with_model_identity(kwargs["model_identity"])
    chat = [harmony.Message.from_role_and_content(harmony.Role.SYSTEM, system)]
    has_instructions = messages[0]["role"] in ("system", "developer")
    if has_instructions or dialogue.get("tools"):
        developer = harmony.DeveloperContent.new()
        if has_instructions:
            developer = developer.with_instructions(messages[0]["content"])
        if tools := [tool["function"] for tool in dialogue.get("tools", [])]:
            described = [harmony.ToolDescription.new(t["name"], t["description"], t["parameters"]) for t in tools]
            developer = developer.with_function_tools(described)
        chat.append(harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, developer))

    def say(role: Any, text: str, channel: str | None = None) -> Any:
        message = harmony.Message.from_role_and_content(role, text)
        return message.with_channel(channel) if channel else message

    called = ""
    for message in messages[has_instructions:]:
        if message["role"] == "user":
            chat.append(say(harmony.Role.USER, message["content"]))
        elif message["role"] == "tool":
            author = harmony.Author.new(harmony.Role.TOOL, called)
            answer = harmony.Message.from_author_and_content(author, json.dumps(message["content"], ensure_ascii=False))
            chat.append(answer.with_channel("commentary").with_recipient("assistant"))
        else:
            calls = message.get("tool_calls", [])
            thoughts = message.get("thinking") or (message.get("content") if calls else "")
            if thoughts:
                chat.append(say(harmony.Role.ASSISTANT, thoughts, "analysis"))
            for call in calls:
                called = f"functions.{call['function']['name']}"
                arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                step = say(harmony.Role.ASSISTANT, arguments, "commentary").with_recipient(called)
                chat.append(step.with_content_type("<|constrain|>json"))
            if not calls:
                chat.append(say(harmony.Role.ASSISTANT, message["content"], "final"))
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    conversation = harmony.Conversation.from_messages(chat)
    if kwargs.get("add_generation_prompt"):
        return encoding.decode_utf8(encoding.render_conversation_for_completion(conversation, harmony.Role.ASSISTANT))
    return encoding.decode_utf8(encoding.render_conversation_for_training(conversation))


_tekken: dict[str, Any] = {}


def by_mistral_common(dialogue: dict[str, Any], tokenizer_version: str) -> str:
    """The dialogue as the tokenizer of Mistral's own library encodes it."""
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.instruct.validator import ValidationMode
    from mistral_common.tokens.tokenizers.base import SpecialTokens
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    if tokenizer_version not in _tekken:
        # A vocabulary of the package with that version's name: how a chat is written depends on no more.
        first = ["<unk>", "<s>", "</s>"]
        tokens = first + [token.value for token in SpecialTokens if token.value not in first]
        data = json.loads((MistralTokenizer._data_path() / "tekken_240911.json").read_text(encoding="utf-8"))
        data["config"]["version"] = tokenizer_version
        data["special_tokens"] = [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(tokens)]
        data.pop("image")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tekken.json"
            path.write_text(json.dumps(data), encoding="utf-8")
            _tekken[tokenizer_version] = {
                mode: MistralTokenizer.from_file(str(path), mode=mode)
                for mode in (ValidationMode.finetuning, ValidationMode.test)
            }
    ends_with_answer = dialogue["messages"][-1]["role"] == "assistant"
    mode = ValidationMode.finetuning if ends_with_answer else ValidationMode.test
    messages = json.loads(json.dumps(dialogue["messages"]))
    for message in messages:
        for call in message.get("tool_calls", []):
            if not isinstance(call["function"]["arguments"], str):  # the library's own type
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    request = ChatCompletionRequest.from_openai(messages=messages, tools=dialogue.get("tools"))
    return _tekken[tokenizer_version][mode].encode_chat_completion(request).text


def differences(rendering: str, encode: Callable[[], str]) -> str:
    """Empty where both are equal, otherwise what differs first."""
    try:
        other = encode()
    except Exception as error:  # the libraries validate more than the templates do
        return f"refused: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
    if other == rendering:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(rendering, other, strict=False)) if a != b), 0)
    return f"template {rendering[max(0, at - 40) : at + 60]!r}, library {other[max(0, at - 40) : at + 60]!r}"


def checked(family: str, dialogue: dict[str, Any]) -> dict[str, str] | None:
    """The outcome of comparing the recorded rendering with the maker's library; None where there is none."""
    rendering = dialogue["rendering"]
    if family == "gpt-oss":
        library, found = "openai-harmony", {"": differences(rendering, lambda: by_harmony(dialogue))}
    elif family == "mistral":
        library, found = "mistral-common", {}
        for name in dialogue["sources"]:
            found[name] = differences(rendering, lambda name=name: by_mistral_common(dialogue, name))  # type: ignore[misc]
    else:
        return None
    try:
        against = f"{library} {version(library)}"
    except ImportError:
        return dialogue.get("cross_check")
    differ = "; ".join(f"{name}: {text}".removeprefix(": ") for name, text in found.items() if text)
    return {"library": against, "outcome": differ or "equal"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="where the official templates lie")
    parser.add_argument("names", nargs="*", help="of which templates of ours; default: of all")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a recording would change")
    arguments = parser.parse_args()
    changed = []
    for path in sorted(DIALOGUES.glob("*.json")):
        if arguments.names and path.stem not in arguments.names:
            continue
        family = json.loads(path.read_text(encoding="utf-8"))
        texts = templates(family, arguments.folder)
        for dialogue in family["dialogues"]:
            rendered = {name: official(texts[name], dialogue, family["special_tokens"]) for name in dialogue["sources"]}
            if len(set(rendered.values())) > 1:
                raise SystemExit(f"{path.name}, {dialogue['name']!r}: {', '.join(rendered)} do not render alike")
            dialogue["rendering"] = rendered.popitem()[1]
            outcome = checked(path.stem, dialogue)
            if outcome:
                dialogue["cross_check"] = outcome
                print(f"{path.stem}, {dialogue['name']}: {outcome['outcome']}")
        text = json.dumps(family, indent=1, ensure_ascii=False) + "\n"
        if text != path.read_text(encoding="utf-8"):
            changed.append(path.name)
            if not arguments.check:
                path.write_text(text, encoding="utf-8")
    print(f"changed: {', '.join(changed) or 'none'}")
    sys.exit(arguments.check and bool(changed))


if __name__ == "__main__":
    main()

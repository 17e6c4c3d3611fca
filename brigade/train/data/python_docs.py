"""Building the built-in data set: questions about Python's standard library, answered by its own documentation."""

import ast
import hashlib
import importlib
import inspect
import json
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import cache
from ..recipe.files import read_yaml

VOCABULARY = 4096
LONGEST, SHORTEST = 700, 20  # characters of an answer; what is shorter says nothing that the name does not
SUMMARY = 240  # characters of text beside a signature
HELD_OUT_ONE_IN = 25
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
QUESTIONS, SKIPPED, COMPILED = read_yaml(Path(__file__).with_suffix(".yaml")).values()


@dataclass(frozen=True)
class _Topic:
    name: str  # dotted
    kind: str  # one of the first four keys of QUESTIONS
    doc: str | None
    call: str = ""  # what stands behind the name in a call; empty where that says nothing
    members: tuple[str, ...] = ()


def build(home: Path, form: int, template: str, within: Callable[[Path], Any]) -> Path:
    """The folder of the built-in data under `home`, named by the text that it is made of.

    form, template, within: FORMAT, the text of TEMPLATE, and BuiltIn.within of builtin.py, which imports this module late
    """
    sources, compiled = _sources(), tuple(_compiled_topics())
    # By the text that goes in rather than the chats that come out: then nothing need be parsed to know the folder.
    content = hashlib.sha256(f"{form} {platform.python_version()}".encode())
    parts = [template.encode(), repr(compiled).encode()]
    for part in parts + [part for name, text in sources.items() for part in (name.encode(), text)]:
        content.update(len(part).to_bytes(8, "big") + part)
    target = home / f"python-docs-{content.hexdigest()[:16]}"
    return cache.once(target, Path.is_dir, lambda aside: _build(within(aside), sources, compiled, template))


def _build(paths: Any, sources: dict[str, bytes], compiled: tuple[_Topic, ...], template: str) -> None:
    topics = list(compiled)
    for name, text in sources.items():
        with suppress(SyntaxError):  # not every file that ends in .py is Python for this version
            topics += _scope_topics(name, "module", ast.parse(text))
    train, heldout = _split(topics)
    for path, chats in ((paths.train, train), (paths.heldout, heldout)):
        path.write_text("".join(json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats), encoding="utf-8")
    _train_tokenizer(train, paths.tokenizer, template)
    for path in filter(Path.is_file, paths.train.parent.rglob("*")):
        with path.open("rb+") as file:  # a crash of the host must not keep the folder and lose the contents
            os.fsync(file.fileno())


def _split(topics: list[_Topic]) -> tuple[list[dict], list[dict]]:
    """Return the training and the held-out chats, each in an order that is mixed but always the same."""
    names, docs = set(), set()
    sides: tuple[list[dict], list[dict]] = ([], [])
    for topic in sorted(topics, key=lambda topic: (_stable(topic.name), topic.name)):
        doc = _shorten(inspect.cleandoc(topic.doc or ""), LONGEST)
        # One name per text, so no answer stands on both sides (all answers but the text itself hold the name).
        if len(doc) >= SHORTEST and topic.name not in names and doc not in docs:
            names.add(topic.name)
            docs.add(doc)
            sides[_stable(topic.name) % HELD_OUT_ONE_IN == 0].extend(_chats(topic, doc))
    for side in sides:
        side.sort(key=lambda chat: _stable(chat["messages"][0]["content"]))
    return sides


def _chats(topic: _Topic, doc: str) -> Iterator[dict]:
    answers = {topic.kind: doc}
    if topic.call:
        answers["call"] = f"`{topic.name}{topic.call}`\n\n{_shorten(doc, SUMMARY)}".rstrip()
    if len(topic.members) > 2:
        answers["members"] = f"`{topic.name}` has `{'`, `'.join(topic.members[:-1])}` and `{topic.members[-1]}`."
    for kind, answer in answers.items():
        if len(answer) <= LONGEST:
            question = QUESTIONS[kind][_stable(f"{kind} {topic.name}") % 3].format(topic.name)
            yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _stable(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _shorten(text: str, longest: int) -> str:
    """Return the first paragraphs of a text, or the first sentences where its first paragraph alone is too long."""
    text = text.strip()
    if len(text) > longest:
        paragraphs = [match.start() for match in re.finditer(r"(?<=\S)(?=\n\n)", text)]
        sentences = [match.start() for match in re.finditer(r"(?<=[.!?])(?=\s)", text)]
        within = [[end for end in ends if end <= longest] for ends in (paragraphs, sentences)]
        text = text[: max(within[0] or within[1], default=0)]
    while text.endswith(":"):  # a paragraph that announces what was cut off is no end
        text = text.rpartition("\n\n")[0].rstrip()
    return text


def _train_tokenizer(chats: list[dict], directory: Path, template: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # every byte, so no text is unknown
        show_progress=False,
    )
    # With the role names, which the template puts before every message.
    texts = (f"{message['role']}\n{message['content']}" for chat in chats for message in chat["messages"])
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise RuntimeError(f"the text yields {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=template,
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 20,
    ).save_pretrained(directory)


def _sources() -> dict[str, bytes]:
    """Return the source of each public module of the standard library by dotted name, in the order of the names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = {}
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = filter(_public, subfolders)
        package = Path(folder).relative_to(root).parts
        for stem, suffix in map(os.path.splitext, files):
            if suffix == ".py" and (_public(stem) or stem == "__init__"):
                name = ".".join(package if stem == "__init__" else (*package, stem))
                sources[name] = Path(folder, stem + suffix).read_bytes()
    if not sources:
        raise FileNotFoundError(f"no sources of the standard library under {root}")
    return dict(sorted(sources.items()))


def _public(name: str) -> bool:
    # That leaves out site-packages and lib-dynload, too: a hyphen makes no identifier.
    return name.isidentifier() and not name.startswith("_") and name not in SKIPPED


def _scope_topics(name: str, kind: str, node: ast.Module | ast.ClassDef) -> Iterator[_Topic]:
    members, call = [], ""
    for inner in _definitions(node.body):
        if inner.name == "__init__" and not isinstance(inner, ast.ClassDef):
            call = _call(inner, bound=True)
        elif _public(inner.name):
            members.append(inner.name)
            inner_name = f"{name}.{inner.name}"
            if isinstance(inner, ast.ClassDef):
                yield from _scope_topics(inner_name, "class", inner)
            else:
                yield _function_topic(inner_name, inner, method=kind == "class")
    yield _Topic(name, kind, ast.get_docstring(node, clean=False), call, tuple(dict.fromkeys(members)))


def _definitions(body: list[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in body:
        if isinstance(node, ast.If | ast.Try):  # many definitions hang on the platform
            yield from _definitions(node.body + node.orelse)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _function_topic(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> _Topic:
    doc = ast.get_docstring(node, clean=False)
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    if decorators & {"property", "cached_property", "setter", "deleter"}:
        return _Topic(name, "attribute", doc)
    return _Topic(name, "callable", doc, _call(node, bound=method and "staticmethod" not in decorators))


def _call(node: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool) -> str:
    arguments = ast.unparse(node.args)
    if bound:  # the caller does not write `self`
        arguments = re.sub(r"^\w+(, /)?(, )?", "", arguments)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({arguments}){returns}" if arguments else ""


def _compiled_topics() -> Iterator[_Topic]:
    for module_name in COMPILED:
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # not on every platform
            continue
        for name, value in sorted(vars(module).items()):
            # Hooks are there to be replaced, and the text must not depend on who did so.
            at_home = (getattr(value, "__module__", None) or "").strip("_") in (module_name, "posix", "nt")
            if not at_home or not _public(name) or name.endswith("hook"):
                continue
            name = name if module_name == "builtins" else f"{module_name}.{name}"
            if inspect.isclass(value):
                yield _object_topic(name, "class", value)
                for inner in filter(_public, sorted(vars(value))):
                    member = getattr(value, inner, None)
                    if inspect.isroutine(member) or inspect.isdatadescriptor(member):
                        yield _object_topic(f"{name}.{inner}", "callable" if callable(member) else "attribute", member)
            elif inspect.isbuiltin(value):
                yield _object_topic(name, "callable", value)


def _object_topic(name: str, kind: str, value: object) -> _Topic:
    doc, call = value.__doc__ if isinstance(value.__doc__, str) else None, ""
    with suppress(TypeError, ValueError):  # attributes have no signature, and many compiled functions do not tell
        signature = inspect.signature(value)  # type: ignore[arg-type]
        parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
        call = str(signature.replace(parameters=parameters)) if parameters else ""
    return _Topic(name, kind, doc, "" if " at 0x" in call else call)  # an address differs in every process

"""The files that lint looks at: which kind each is, by its content, and what is wrong with it by itself."""

import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from ..errors import UserError, nearest
from ..errors.findings import Finding
from ..train.data.arrow_values import json_or
from ..train.host.limits import CONFIG_BYTES
from ..train.recipe import flags, remote_code
from ..train.recipe.files import TWICE, find, is_directory, read_yaml
from ..train.recipe.hostfile import parse_hostfile
from ..train.recipe.mistakes import MEANINGS, OTHER_NAMES
from ..train.recipe.program import NAMES_CODE, TASKS
from ..train.recipe.schema import SECTION_OF, SECTIONS
from ..train.strategy import accelerate_config, deepspeed_config
from ..train.strategy.ds_keys import key_table
from . import accelerate as launcher
from . import ds_config

Kind = Literal["hostfile", "ds_config", "accelerate", "recipe", "env", "model", "broken"]
_SLOTS = re.compile(r"^\s*[^#\s]\S*\s.*\bslots?\s*=", re.MULTILINE)
_OUTSIDE = {*SECTION_OF, *OTHER_NAMES, *MEANINGS} - {*SECTIONS}
_VARIABLE = re.compile(r"^\w+=")


@dataclass
class File:
    """A file that was read.

    name: what the user, or the file that refers to it, calls it
    content: {host: slots} of a hostfile, the keys of a ds_config or accelerate config, a recipe's Settings; else None
    lines: dotted key -> line number
    """

    name: str
    kind: Kind
    content: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return self.kind != "broken" and all(finding.severity != "error" for finding in self.findings)


class Files:
    """All files that were opened, each once, however often it is named. read: path -> file"""

    def __init__(self) -> None:
        self.read: dict[Path, File] = {}

    def open(self, name: str, named_by: File | None = None, at: str = "", wanted: Kind | None = None) -> File:
        """The file, with what is wrong with it. named_by, at: the file and key that refer to it, where one does; wanted: the
        kind that belongs there."""
        try:
            path = find(name, "", "file")
        except UserError as error:
            where, file = named_by or self.read.setdefault(Path(name), File(name, "broken")), File(name, "broken")
            finding = Finding("file-missing", where.name, at, error.problem, error.cure)
        else:
            file = self.read.get(path.resolve()) or self.read.setdefault(path.resolve(), _read(name, path))
            if not named_by or file.kind in (wanted, "broken"):
                return file
            where, problem = named_by, f"{file.name} is a {file.kind}, not a {wanted}"
            finding = Finding("file-kind", where.name, at, problem, f"name a {wanted} here")
        if finding not in where.findings:
            where.findings.append(finding)
        return file

    def line(self, finding: Finding) -> int | None:
        """The line of a finding's key, or of the table in which the key is missing."""
        if isinstance(finding.at, int):
            return finding.at
        lines = next((file.lines for file in self.read.values() if file.name == finding.file), {})
        at = finding.at
        while at and at not in lines:
            at = at.rpartition(".")[0]
        return lines.get(at)


def _read(name: str, path: Path) -> File:
    def broken(rule: str, problem: str, cure: str) -> File:
        return File(name, "broken", findings=[Finding(rule, name, "", problem, cure)])

    try:
        if path.is_dir():
            error = is_directory(path)
            return broken("file-unreadable", error.problem, error.cure)
        if not path.is_file():
            return broken("file-unreadable", "it is not a file", "name a file")
        if path.stat().st_size > CONFIG_BYTES:
            return broken(
                "file-kind",
                f"it has more than {CONFIG_BYTES:,} bytes, more than any file that lint reads",
                "name another file",
            )
        text = path.read_bytes().decode()
    except OSError as error:
        return broken("file-unreadable", f"it cannot be read: {error.strerror}", "check the file's permissions")
    except UnicodeDecodeError:
        return broken("file-unreadable", "its bytes are no UTF-8 text", "name a text file")
    kind = recognise(path.name, text)
    if not kind:
        cure = "start from a file of hostfiles/, ds_configs/, accelerate_configs/ or recipes/"
        return broken("file-kind", "neither hostfile nor ds_config, accelerate config, recipe or .deepspeed_env", cure)
    file = File(name, kind)
    try:
        _read_content(file, path, text)
    except UserError as error:  # its syntax is broken
        return File(name, "broken", findings=[of_error("file-syntax", error, name, path)])
    return file


def recognise(file_name: str, text: str) -> Kind | None:
    """The kind of a file by its text; None when it looks like none of ours. The name only breaks ties."""
    if file_name.endswith("deepspeed_env"):
        return "env"
    if text.lstrip("\ufeff \t\r\n").startswith("{") or file_name.endswith(".json"):
        return _kind_of_json(text)
    is_yaml = file_name.endswith((".yaml", ".yml"))
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    prose = [line for line in lines if len(line.split()) > 3 and not _SLOTS.match(line)]
    if not is_yaml and _SLOTS.search(text) and 2 * len(prose) < len(lines):  # else it is a page about hostfiles
        return "hostfile"
    if lines and all(_VARIABLE.match(line) for line in lines):
        return "env"
    tree, is_whole = _parsed(text)
    if not is_whole:
        return "recipe" if is_yaml else None  # a recipe's reader says where it is broken
    if not isinstance(tree, yaml.MappingNode):
        bare_names = bool(lines) and all(re.fullmatch(r"[\w.\-]+(\s+\d+)?", line) for line in lines)
        return "hostfile" if not is_yaml and "." not in file_name and (bare_names or not lines) else None
    keys = {str(key.value) for key, _ in tree.value}
    ours, theirs = keys & SECTIONS.keys(), keys & set(accelerate_config.KEYS["top_level"])
    flat = keys & _OUTSIDE - theirs  # of another tool's file, whose keys a recipe's reader names: two may be chance
    if ours or theirs or len(flat) > 2:
        return "recipe" if len(ours | flat) >= len(theirs) else "accelerate"
    return "recipe" if any(nearest(key, SECTIONS) for key in keys) else None


def _kind_of_json(text: str) -> Kind | None:
    document = json_or(None, text)
    if not isinstance(document, dict) or not document:
        return "ds_config"  # whose reader says where it is broken
    if "distributed_type" in document:
        return "accelerate"
    if "model_type" in document or "architectures" in document:
        return "model"
    known = [path for part in ("allowed", "removed", "deprecated") for path in key_table()[part] if "." not in path]
    flat = document.keys() & _OUTSIDE - {*known}  # arguments of another tool, in JSON, which is YAML, too
    if len(flat) > 2 and len(flat) >= len(document.keys() & known):
        return "recipe"
    return "ds_config" if any(nearest(key, known) for key in document) else None


def _read_content(file: File, path: Path, text: str) -> None:
    """Read the file by its kind, and note what is wrong with it. Raises UserError for broken syntax."""
    if file.kind in ("ds_config", "accelerate", "recipe"):
        file.lines, twice = key_lines(text)
        if twice:
            file.kind, cure = "broken", "keep one of them"
            file.findings = [Finding("file-duplicate-key", file.name, n, f"{at} {TWICE}", cure) for at, n in twice]
            return
    if file.kind == "hostfile":
        file.content, findings = parse_hostfile(text, file.name)
        file.findings = [*findings, *_hosts(file.content, file.name)]
        file.lines = {line.split()[0]: n for n, line in reversed([*enumerate(text.splitlines(), 1)]) if line.strip()}
    elif file.kind == "env":
        file.findings = list(_deepspeed_env(text, file.name))
    elif file.kind == "ds_config":
        _, file.content = deepspeed_config.read(str(path), file.name)
    elif file.kind == "accelerate":
        file.content = read_yaml(path)
        file.findings = list(launcher.findings(file.content, file.name))
    elif file.kind == "recipe":
        try:
            file.content = flags.load([f"--recipe={path}"], loads_model=False)
            file.findings = [*_model_code(file, path), *_own_code(file), *_kept_words(file)]
        except UserError as error:
            rule = "recipe-invalid" if file.lines else "file-syntax"
            file.findings = [of_error(rule, error, file.name, path)]
    file.findings += strategy_findings(file)


def _model_code(file: File, path: Path) -> Iterator[Finding]:
    """A finding where a recipe asks for the model's own code, with the files that would run."""
    if file.content.needs_code:
        model = file.content.recipe.model
        files = remote_code.files_of(remote_code.names_of(model, path), model.revision)
        yield Finding.of("recipe-code", file.name, "model.trust_remote_code", files=files, flag=remote_code.FLAG)


def _own_code(file: File) -> Iterator[Finding]:
    """A finding for each key of a recipe that names Python."""
    for key, names in NAMES_CODE.items():
        files = names(file.content.recipe.training)
        if files:
            flag = f"--{key} or {remote_code.ALLOW}" if key != TASKS else f"--{key}"
            yield Finding.of("recipe-code", file.name, f"training.{key}", files=", ".join(files), flag=flag)


def _kept_words(file: File) -> Iterator[Finding]:
    """A finding where the words that are kept of a teacher are not those that its divergence is about."""
    training = file.content.recipe.training
    if training.teacher_top_k and training.loss_type in ("reverse_kl", "jsd"):
        values = {"kept": training.teacher_top_k, "form": training.loss_type}
        yield Finding.of("recipe-kept-words", file.name, "training.teacher_top_k", **values)


def _hosts(hosts: dict[str, int], name: str) -> Iterator[Finding]:
    """What only lint says of a hostfile."""
    for host in hosts:
        if host.lower() in launcher.LOOPBACK and len(hosts) > 1:
            yield Finding.of("hostfile-localhost", name, host, host=host, count=len(hosts))
    ((usual, most),) = Counter(hosts.values()).most_common(1) or [(0, 0)]
    for host, slots in hosts.items():
        if slots != usual:
            values = {"slots": slots, "host": host, "most": most, "count": len(hosts), "usual": usual}
            yield Finding.of("hostfile-unequal", name, host, **values)
            return


def _deepspeed_env(text: str, name: str) -> Iterator[Finding]:
    """A finding for each line of the file of variables that DeepSpeed's launcher sends along which is no NAME=value, or whose
    value hosts get as another one. None shows the line, whose text may be a secret."""
    for number, line in enumerate(text.splitlines(), 1):
        is_comment, value = line.lstrip().startswith("#"), line.partition("=")[2]
        if "=" not in line or is_comment:
            kind = "a comment" if is_comment else "no NAME=value" if line.strip() else "a blank line"
            yield Finding.of("env-line", name, number, what=kind)
        elif {'"', "'"} & set(value) or " #" in value:
            yield Finding.of(
                "env-value", name, number, what="a comment behind the value" if " #" in value else "quotes"
            )


def strategy_findings(file: File) -> list[Finding]:
    """What a run and lint say of a ds_config or of an accelerate config's strategy, in a file of its own or in a recipe.

    The keys of a ds_config's content get DeepSpeed's own names.
    """
    if file.kind == "ds_config":
        file.content, judged = deepspeed_config.judge(file.content, file.name)
        return [*judged, *ds_config.findings(file.content, file.name)]
    if file.kind != "accelerate":
        return []
    findings = list(accelerate_config.findings(file.content, file.name))
    if not findings:
        config = accelerate_config.read(file.content, file.name).ds_config
        if isinstance(config, dict):
            findings += deepspeed_config.judge(config, f"{file.name}: deepspeed_config")[1]
    return findings


def of_error(rule: str, error: UserError, name: str, path: Path) -> Finding:
    """A UserError about a file as a finding, with its place taken apart into the file and a key or a line."""
    for prefix in (name, str(path)):
        rest = error.place.removeprefix(prefix)
        if rest != error.place:
            line = re.fullmatch(r", line (\d+)", rest)
            return Finding(rule, name, int(line[1]) if line else rest.lstrip(": "), error.problem, error.cure)
    return Finding(rule, error.place, "", error.problem, error.cure)


@functools.lru_cache(maxsize=1)
def _parsed(text: str) -> tuple[yaml.Node | None, bool]:
    """(the nodes of a YAML text, or of a JSON text, which is YAML too except in rare cases; whether it could be read).

    What is broken is read once too: brackets without end take a second.
    """
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader), True
    except (yaml.YAMLError, ValueError, RecursionError):
        return None, False


def key_lines(text: str) -> tuple[dict[str, int], list[tuple[str, int]]]:
    """({dotted key: line} of a YAML or JSON text, [(key that stands twice, line)])."""
    lines: dict[str, int] = {}
    twice: list[tuple[str, int]] = []
    seen: set[int] = set()
    nodes: list[tuple[str, yaml.Node | None]] = [("", _parsed(text)[0])]
    while nodes:
        prefix, node = nodes.pop()
        if not isinstance(node, yaml.MappingNode) or id(node) in seen:  # an alias may stand often, even inside itself
            continue
        seen.add(id(node))
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                at, line = f"{prefix}{key.value}", key.start_mark.line + 1
                if at in lines:
                    twice.append((at, line))
                lines[at] = line
                nodes.append((f"{at}.", value))
    return lines, twice

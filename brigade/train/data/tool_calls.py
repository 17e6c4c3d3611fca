"""Tool calls and definitions of tools in one form, OpenAI's, whichever of the usual keys a row has for them."""

import json
import re
from collections.abc import Mapping
from typing import Any

from ...errors import first_line, shown
from ...errors.tables import Document, Fields
from .arrow_values import json_or
from .json_texts import from_any_text, from_json, value_of
from .keys import says_nothing
from .rows import BadRow, Message, Tools

# Names of a call's arguments: OpenAI's, Llama's (and Cohere's), Anthropic's, LangChain's.
ARGUMENTS = ("arguments", "parameters", "input", "args")
# Names of the schema of what a tool takes: OpenAI's, Anthropic's, the Model Context Protocol's.
SCHEMAS = ("parameters", "input_schema", "inputSchema")
RESULTS = ("result", "results", "output", "response", "error")  # of a call, beside it
# Of a definition, which has schemas of its results there.
ABOUT_RESULTS = (*RESULTS, "return", "returns", "output_schema", "outputSchema")
# Of a call itself, beside its function.
ABOUT = ("call_id", "tool_call_id", "status", "namespace", "description", "title", "strict", "thought_signature", "cache_control",
         "extra_content", "provider_specific_fields")  # fmt: skip
MAY_BE_NULL = ("default", "const", "enum", "example", "examples")  # keys of a schema
# Keys of a schema that hold objects of schemas, schemas or lists of them, and lists.
NAMED_WITHIN = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SCHEMAS_WITHIN = ("items", "prefixItems", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "contains", "propertyNames",
                  "additionalProperties")  # fmt: skip
LISTS_WITHIN = ("type", "enum", "required")
# How a text begins that is an object, or a list of objects or texts.
_AS_JSON = re.compile(r"""\s*["']?(?:\{\s*\\*["'}]|\[\s*\\*["'{\]])""")
KNOWN = frozenset(("id", "type", "index", "function", "name", *ARGUMENTS))  # keys of a call
# What opens a call once a template has written it: Hermes', Llama 3's and 4's, Mistral's, DeepSeek's, Kimi's, MiniMax's, Qwen's.
_SPELLED = re.compile(
    r"<[|\uff5c]?(?:\w+:)?tool[_\u2581]calls?(?:[_\u2581](?:section[_\u2581])?(?:begin|start))?[|\uff5c]?>|"
    r"<function=|<function_calls?>|<\|python_\w+\|>|\[TOOL_CALLS\]|<invoke name="
)


def refuse_spelled(content: str, calls: list[Fields]) -> None:
    """Raise BadRow for a text beside calls that spells a call, which the template would write a second time. Thoughts before it
    may speak of the marks."""
    content = content.rpartition("</think>")[2].strip()
    mark = _SPELLED.search(content)
    if mark or (content.startswith("{") and json_or(None, content) in [call["function"] for call in calls]):
        problem = f"the text beside a turn's tool_calls spells a call ({mark[0] if mark else shown(content)})"
        raise BadRow(problem, "remove it from the content, which the chat template writes besides, or drop tool_calls")


def calls_of(value: object, called: str, unread: set[str]) -> list[Fields]:
    """Return tool calls whose arguments are objects, as chat templates expect; OpenAI's are JSON in a text.

    called: what holds them; unread: a set to which the keys that nobody reads are added
    Raises BadRow.
    """
    value = from_json(value, called)
    return [_call(call, unread) for call in (value if isinstance(value, list) and value else [value])]


def _call(call: Any, unread: set[str]) -> Fields:
    call = from_json(call, "a tool call") if isinstance(call, str) and call.lstrip().startswith("{") else call
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        problem = f"a tool call without a function's name: {repr(call)[:60]}"
        raise BadRow(problem, 'write {"function": {"name": ..., "arguments": {...}}}')
    name, levels = function["name"], {"": function} | ({} if function is call else {" beside the function": call})
    if call.get("name") not in (None, name):
        problem = f"a tool call has the name {name!r}, and beside its function {shown(call['name'])}"
        raise BadRow(problem, "keep one of them")
    given = {
        f"{key}{at}": _arguments(level[key], f"{key} of the call {name!r}")
        for key in ARGUMENTS
        for at, level in levels.items()
        if not says_nothing(level.get(key))
    }
    if not any(given.values()):
        _refuse_others(name, levels)
    arguments = one_of(given, f"of the call {name!r}") or {}
    refuse_what_json_lacks(arguments, f"the arguments of the call {name!r}")
    if holds_null(arguments):
        unread.add("null in arguments of tool calls, learned as null")
    unread |= {
        f"key {key!r} of tool calls"
        for level in levels.values()
        for key, value in level.items()
        if key not in KNOWN and not says_nothing(value)
    }
    rest = {key: call[key] for key in ("id", "index") if call.get(key) is not None}
    return rest | {"type": "function", "function": {"name": name, "arguments": arguments}}


def _refuse_others(name: str, levels: Mapping[str, Document]) -> None:
    """Raise BadRow for a call without arguments by a known name, where another key may hold them (kwargs, params), or be one of
    them.

    Of a call that says nothing of arguments each key beside its name may be one. Beside an empty object only another object
    counts, and what lies outside the function is about the call.
    """
    given = [level[key] for level in levels.values() for key in ARGUMENTS if key in level]
    says_none = any(value is not None for value in given)
    for at, level in levels.items():
        for key, value in level.items():
            known = key in KNOWN or key in RESULTS or key in ABOUT or says_nothing(value) or bool(at and says_none)
            holds = isinstance(value, dict) or (isinstance(value, str) and value.lstrip().startswith("{"))
            if not known and (holds or not (at or given)):
                problem = f"the call {name!r} has no arguments, and {key!r}, which is not read, seems to hold them"
                raise BadRow(problem, f'write "arguments": {{...}} instead of {key!r}, {{}} for a call that has none')


def _arguments(value: object, called: str) -> Fields:
    read = from_json(value, called)
    read = from_json(read, called) if isinstance(read, str) else read  # encoded twice
    if not isinstance(read, dict):
        raise BadRow(f"{called} are {shown(read)}, not an object", 'write {"NAME": VALUE, ...}')
    return read


def one_of(given: Document, of: str) -> Any:
    """Return what is given under several names, None where nothing is. Raises BadRow where they differ."""
    first, *others = given.items() or [("", None)]
    other = next((key for key, value in others if value != first[1]), None)
    if other:
        raise BadRow(f"{first[0]} and {other} {of} contradict each other", f"keep one of them, as {first[0]}")
    return first[1]


def behind_its_call(result: Message, number: int, calls: list[Fields], begin: int) -> int:
    """Return the place behind the call of which message `number` is the result, by its id or else by its tool's name: `begin` or
    later, where nothing tells `begin` itself. A tool of this name may say more right behind its result. Raises BadRow for an
    earlier call's: most templates write neither."""
    ids, names = [call.get("id") for call in calls], [call["function"]["name"] for call in calls]
    for key, own in ("tool_call_id", ids), ("name", names):
        given = result.get(key)
        if given is not None and given in own:
            if given in own[begin:]:
                return own.index(given, begin) + 1
            if key == "name" and begin and own[begin - 1] == given:
                return begin
            problem = (
                f"message {number} is the result of an earlier call than the one before it, or of the same one ({key})"
            )
            raise BadRow(problem, "give each call's result once, in the order of the calls")
    return begin


def tool_definitions(tools: object, functions: object = None) -> Tools | None:
    """Return definitions of tools, or None. They may be a list of objects or JSON of one (Arrow cannot hold tools of different
    parameters), and so may each of them, its parameters, and the schemas in these.

    functions: OpenAI's older form, without the object around each
    """
    definitions = []
    for given, key in (tools, "tools"), (functions, "functions"):
        value = from_any_text(given or None, key)
        if not value:
            continue
        if isinstance(value, list):
            value = [from_any_text(tool, key) for tool in value]
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            raise BadRow(f"{key} is {shown(value)}, not a list of definitions", "give a list of JSON schemas")
        refuse_what_json_lacks(value, key)
        found = [_definition(tool, key) for tool in value]
        refuse_what_json_lacks(found, key)  # also what stood as JSON within them
        definitions += found
    return definitions or None


def _definition(tool: Fields, called: str) -> Fields:
    if says_nothing(tool.get("function")):
        tool = {key: value for key, value in tool.items() if key != "function"}
    inner = tool.get("function", tool)
    if isinstance(inner, str) and inner.lstrip().startswith("{"):
        inner = from_any_text(inner, f"functions in {called}")
    if not isinstance(inner, dict):
        raise BadRow(f"a function in {called} is {shown(inner)}, not a definition", "give a JSON schema")
    of = f"of the tool {inner.get('name')!r}"
    given = {key: _parameters(inner[key], f"{key} {of}") for key in SCHEMAS if not says_nothing(inner.get(key))}
    if given:
        others = {key: value for key, value in inner.items() if key not in SCHEMAS}
        inner = others | {"parameters": one_of(given, of)}
    elif not any(isinstance(inner.get(key), dict) for key in SCHEMAS):  # {}: it takes nothing
        _refuse_other_schemas({**tool, **inner}, of)
    if called == "functions":
        tool = {"type": "function", "function": inner}
    return tool | {"function": inner} if "function" in tool else inner


def _parameters(value: object, called: str) -> Any:
    """Return the schema of what a tool takes. It may also be an object of schemas alone, as xLAM's are."""
    read = from_any_text(value, called)
    if not isinstance(read, dict) or {"properties", "$defs"} & read.keys() or isinstance(read.get("type"), str):
        return _schema(read, called)
    objects = {key: value_of(inner) if isinstance(inner, str) else inner for key, inner in read.items()}
    return read | {key: _schema(inner, called) for key, inner in objects.items() if isinstance(inner, dict | list)}


def _schema(value: object, called: str) -> Any:
    """Return a schema, or a list of them. A text of JSON where an object or a list has to stand is what tables leave whose types
    are lost: it is read. Raises BadRow where it cannot be."""
    if isinstance(value, str) and _AS_JSON.match(value):
        value = from_any_text(value, called)
    if isinstance(value, list):
        return [_schema(inner, called) for inner in value]
    if not isinstance(value, dict):
        return value
    return {key: _of_schema(key, inner, f"{key} in the {called}") for key, inner in value.items()}


def _of_schema(key: str, value: object, called: str) -> Any:
    if key in SCHEMAS_WITHIN:
        return _schema(value, called)
    if key in LISTS_WITHIN and isinstance(value, str) and value.startswith(("[", '"')):
        read = json_or(value_of(value), value)
        return value if read is None else read
    if key not in NAMED_WITHIN or not value:
        return value
    if isinstance(value, str) and value.strip() in ("null", "None"):
        return {}
    read = from_any_text(value, called)
    if isinstance(read, dict):
        return {name: _schema(inner, f"{name!r} in the {called}") for name, inner in read.items()}
    if isinstance(value, str):
        raise BadRow(f"{called} are {shown(read)}, not an object", 'write {"NAME": {"type": ...}, ...}')
    return value


def _refuse_other_schemas(definition: Fields, of: str) -> None:
    """Raise BadRow for a definition without a schema by a known name, where another key holds one, or it stands beside the
    function: no template reads it there."""
    for key, value in definition.items():
        if key not in ("function", *ABOUT_RESULTS) and _is_schema(
            json_or(value, value) if isinstance(value, str) else value
        ):
            problem = f"the key {key!r} {of} seems to hold the schema of its arguments, and is not read there"
            raise BadRow(problem, 'write {"type": "function", "function": {"name": ..., "parameters": {...}}}')


def _is_schema(value: object) -> bool:
    """Whether a value says what a tool takes: a JSON schema of an object, or types by the arguments' names."""
    if not isinstance(value, dict) or not value:
        return False
    if isinstance(value.get("properties"), dict) or value.get("type") == "object":
        return True
    return all(isinstance(each, dict) and "type" in each for each in value.values())


def refuse_what_json_lacks(value: object, called: str) -> None:
    """Raise BadRow for a value with what no JSON can say: NaN, an infinity, or what tables hold beside texts and numbers."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        problem = f"{called} hold what JSON cannot say: {first_line(error)}"
        raise BadRow(problem, "write null, a number or a text instead") from None


def holds_null(value: object) -> bool:
    """Whether null stands in an object or a list where it says nothing: files that tables write have it for each key that other
    rows have. A schema's default may be null."""
    if isinstance(value, dict):
        return any(inner is None or holds_null(inner) for key, inner in value.items() if key not in MAY_BE_NULL)
    return isinstance(value, list) and any(map(holds_null, value))

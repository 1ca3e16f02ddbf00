r"""Take KEY=TEXT as typed, if the schema says that the key holds text.

Hydra's grammar reads commas, quotes, brackets and numbers of a value in its own way, and refuses letters beyond ASCII.
Text is therefore quoted for it, before it parses the command line. What stays Hydra's: `null`, a value that is quoted
as a whole, `${...}` (but in prompts), and the commas of a list or of a sweep.
"""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from enum import Enum
from typing import Any, get_args, get_origin

from models.drafts.options import METHODS, DraftConf
from models.io.errors import require

# The last names of keys that may hold a path, in which a leading ~ is expanded.
PATH_KEYS = {"cache_dir", "checkpoint", "exclude", "file", "name", "output", "output_dir", "path", "prompts"}
PROSE_KEYS = {"prompt", "stop"}  # whose ${...} is text
OVERRIDE = re.compile(r"(\+{0,2}([\w.-]+)=)(.*)", re.DOTALL)
QUOTED = r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
ITEM = re.compile(rf"\s*({QUOTED}|(?:\$\{{[^}}]*\}}|[^,])*)\s*(?:,|\Z)", re.DOTALL)
PLAIN = re.compile(r"(?!(?:true|false|null|inf|nan)$)[a-z_/][\w./-]*", re.ASCII | re.IGNORECASE)
SWEEP = re.compile(r"(choice|glob|interval|range|shuffle|sort|tag)\(.*\)", re.DOTALL)


def quote_typed_text(overrides: list[str], schema: type, *, is_sweep: bool = False) -> list[str]:
    """Return the overrides in Hydra's grammar, with the text of text keys as typed.

    In a sweep commas part the texts of several runs. Raise UserError for empty text, and for a key that has no effect.
    """
    unused = tuple(
        f"{field.name}.{name}" for field in dataclasses.fields(schema) for name in field.metadata.get("unused", ())
    )
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        require(not f"{key}.".startswith(unused), f"{key}: must be left out, as it has no effect here, got {override}")
    return [_quote_override(override, schema, is_sweep) for override in overrides]


def quote(text: str) -> str:
    r"""Return `text` in the quotes of Hydra's grammar, unless it means the same without.

    >>> print(quote("rows.jsonl"), quote("3.10"), quote('a "b", c'))
    rows.jsonl "3.10" "a \"b\", c"
    """
    if PLAIN.fullmatch(text):
        return text
    # A backslash is doubled where a quote follows, and stands for itself elsewhere.
    escaped = re.sub(r'(\\*)("|\Z)', lambda m: 2 * m[1] + m[2].replace('"', r"\""), text)
    return f'"{escaped}"'


def format_overrides(overrides: dict[str, Any]) -> str:
    r"""Return the overrides as shell words.

    >>> format_overrides({"tree.file": None, "device.compile": False, "prompts": "my file.jsonl"})
    'tree.file=null device.compile=false \'prompts="my file.jsonl"\''
    >>> format_overrides({"template.d": {"x": 1, "y": [True, None]}})
    "'template.d={x:1,y:[true,null]}'"
    """
    return shlex.join(f"{key}={_format_value(value)}" for key, value in overrides.items())


def _format_value(value: Any) -> str:
    """Return the text that Hydra parses as `value`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_format_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_format_value, value)) + "]"
    value = value.value if isinstance(value, Enum) else value
    return quote(value) if isinstance(value, str) else str(value)


def _quote_override(override: str, schema: type, is_sweep: bool) -> str:
    match = OVERRIDE.fullmatch(override)
    if match is None:
        return override
    start, key, text = match.groups()
    kinds = list(_list_types(schema, key))
    tables = [kind for kind in kinds if get_origin(kind) is dict and not dataclasses.is_dataclass(get_args(kind)[1])]
    if start == f"{key}=" and text.startswith("{") and tables:
        return f"++{override}"  # its own names may be new, which Hydra refuses without a sign
    types, name = set(kinds), key.rpartition(".")[2]
    is_path_or_list = Any in types and name in PATH_KEYS  # `checkpoint`
    if (is_path_or_list or list[str] in types) and re.fullmatch(r"\[.*\]", text, re.DOTALL):
        return f"{start}[{_quote_items(text[1:-1], key)}]"
    is_unknown = not kinds and not text.isascii()  # quoted, so that Hydra reads it and says so
    if not (is_path_or_list or str in types or is_unknown):
        return override
    if is_sweep:
        return override if SWEEP.fullmatch(text) else start + _quote_items(text, key)
    return start + _quote_item(text, key)


def _quote_items(items: str, key: str) -> str:
    texts = [match[1].strip() for match in ITEM.finditer(items) if match[0]]
    return ",".join(_quote_item(item, key) for item in texts)


def _quote_item(text: str, key: str) -> str:
    require(
        bool(text.strip()),
        f"{key}: must not be empty, got '{text}'; if the text comes from a shell variable, set "
        "it, else leave the key out",
    )
    if text == "null" or re.fullmatch(QUOTED, text, re.DOTALL):
        return text
    if key in PROSE_KEYS:
        text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # no interpolation
    return quote(text)


def _list_types(schema: Any, key: str) -> Iterator[Any]:
    """Yield the types of a key without `| None`: one for each method that has it, if of a draft."""
    name, _, rest = key.partition(".")
    owners = METHODS.values() if schema is DraftConf else [schema]
    for owner in owners:
        if dataclasses.is_dataclass(owner):
            types = [field.type for field in dataclasses.fields(owner) if field.name == name]
        else:
            types = get_args(owner)[1:] if get_origin(owner) is dict else ()
        for kind in types:
            kinds = [part for part in get_args(kind) if part is not type(None)]
            kind = kinds[0] if len(kinds) < len(get_args(kind)) else kind
            yield from _list_types(kind, rest) if rest else [kind]

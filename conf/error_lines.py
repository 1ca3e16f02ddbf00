"""The words for mistakes on the command line and in YAML files, in this project's form."""

import dataclasses
import difflib
import re
import shlex
from collections.abc import Iterator
from typing import Any

from conf.typed_text import quote

MESSAGE_REWRITES = {
    r"Value ('.*') of type '\w+' could not be converted to Float": r"must be a number, got \1; write one such as 0.1",
    r"Value ('.*') of type '\w+' could not be converted to Integer": r"must be an integer, got \1; write one such as 1",
    r"Value ('.*') of type '\w+' is incompatible with type hint 'Union\[int, str\]'": (
        r"must be an integer or auto, got \1; write one such as 1"
    ),
    r"Value ('.*') is not a valid bool": r"must be true or false, got \1",
    r"Invalid value ('.*'), expected one of \[(.*)\]": r"must be one of \2, got \1",
    r"field '.*' is not Optional": "must be set, got null; leave the key out for its default",
    r"Invalid value assigned: (\w+) is not a ListConfig": r"must be a list, got one \1",
    r"Invalid type assigned: \w+ is not a subclass of \w+\. value: ([^\n]*)": r"must be keys with values, got \1",
    r"Cannot assign (\w+) to Dict": r"must be keys with values, got one \1",
    r"Cannot merge DictConfig with ListConfig": (
        "config: must have keys, got a list; write NAME: VALUE in place of - VALUE"
    ),
    r"Config group override must be a string or a list\. Got (\w+)": (
        r"command line: a group takes the name of an option, got a value of type \1; see --help"
    ),
    r"Could not (?:override|delete) '([^']+)'\. No match in the defaults list.*": (
        r"\1: no such key or group in this command; a section has keys of its own, as in device.name=cpu; see --help"
    ),
    r"Unexpected type for root: NoneType": (
        "command line: a key of a group needs a chosen option of the group, got none; "
        "choose one first, as in target=qwen3-8b target.path=DIR"
    ),
    r"Ambiguous value for argument '([^=]+)=([^']*)'": (
        r"\1: must be one value, got '\2'; for a run of each add -m, for a list write \1=[\2]"
    ),
}


def unknown_key_message(key: str, schema: type | None) -> str:
    """Return the line for a key that `schema` does not have, with the most similar key it has."""
    if re.fullmatch(r"mixture\.sources\.[^.]+", key):
        return (
            f"{key}: no such source in this mixture; put the files in a folder, or list sources in a file of your own, "
            "--config-dir=DIR mixture=NAME"
        )
    if not dataclasses.is_dataclass(schema):  # a free dict, such as chat template arguments
        return f"{key}: no such key; to add it write +{key}=VALUE"
    parent, _, name = key.rpartition(".")
    paths = list(_list_paths(schema))
    top_level = [path for path in paths if "." not in path]
    matches = [path for path in paths if path.rpartition(".")[2] == name]
    matches += difflib.get_close_matches(name, top_level, n=1)
    prefix = f"{parent}." if parent else ""
    remedy = f"did you mean {prefix}{matches[0]}?" if matches else f"choose one of {', '.join(sorted(top_level))}"
    return f"{key}: no such key; {remedy}"


def complete_keys(message: str, schema: Any) -> str:
    """Return the line with whole paths for keys of sections that commands have in different places.

    >>> from infer.config import EvalConf
    >>> complete_keys("sampling.top_k: must be at least 0, got -3", EvalConf)
    'evaluation.sampling.top_k: must be at least 0, got -3'
    """
    paths = list(_list_paths(schema))

    def complete(match: re.Match[str]) -> str:
        longer = [path for path in paths if path.endswith(f".{match[0]}")]
        return longer[0] if match[0] not in paths and len(longer) == 1 else match[0]

    return re.sub(r"(?<![\w.])\w+(\.\w+)+(?=: must)", complete, message)


def unknown_option_message(group: str, name: str, options: list[str]) -> str:
    """Return the line for an option that a group does not have, with the most similar one it has."""
    matches = difflib.get_close_matches(name, options, n=1)
    remedy = f"did you mean {group}={matches[0]}?" if matches else f"choose one of {', '.join(options)}"
    return f"{group}: no such option, got '{name}'; {remedy}"


def _list_paths(schema: Any) -> Iterator[str]:
    """Yield the path of every key below a dataclass."""
    for field in dataclasses.fields(schema):
        yield field.name
        if dataclasses.is_dataclass(field.type):
            yield from (f"{field.name}.{path}" for path in _list_paths(field.type))


def unreadable_message(key: str, equals: str, value: str) -> str:
    """Return the line for a word of the command line that Hydra's grammar does not read."""
    if not equals:
        return f"command line: must be KEY=VALUE, got '{key}'; see --help"
    quoted = shlex.quote(f"{key}={quote(value)}")
    return f"{key}: must be a value that Hydra reads, got '{value}'; for text write {quoted}"


def reword_message(text: str) -> str:
    """Rewrite a message of Hydra or OmegaConf in our form; join the lines of unknown ones."""
    for pattern, template in MESSAGE_REWRITES.items():
        if match := re.match(pattern, text, re.DOTALL):
            return match.expand(template)
    return re.sub(r"\s*\n\s*", "; ", text.strip())

"""Splits of a source: a name, a sum of names, or slices such as train[1000:] and train[:10%]+test.

A source that has a single split has it under any name.
"""

import re
from typing import Any

from models.io.errors import UserError, first_line, require

SPLIT_NAME = re.compile(r"(^|\+)\s*[^\[+]+")  # `train` and `test` in train[1000:]+test


def list_split_names(split: str) -> list[str]:
    """List the names in a split.

    >>> list_split_names("train[1000:] + test[:10%]")
    ['train', 'test']
    """
    return [part.partition("[")[0].strip() for part in split.split("+")]


def rename_single(split: str, names: list[str]) -> str:
    """Return the split to load; data with a single split has that one, whatever `split` names.

    A copy of one split often keeps the name that the split has in the original dataset.

    >>> rename_single("train_sft[1000:]", ["train"])
    'train[1000:]'
    >>> rename_single("train_sft", ["train", "test"])
    'train_sft'
    """
    is_single = len(names) == len(set(list_split_names(split))) == 1
    return SPLIT_NAME.sub(rf"\g<1>{names[0]}", split) if is_single else split


def resolve_split(split: str, counts: dict[str, int], split_key: str) -> list[tuple[str, int, int]]:
    """Return the parts of a split as (name, begin, end), where each name has `counts` rows; reject any other split."""
    from datasets import ReadInstruction

    check_split_names(split, list(counts), split_key)
    try:
        parts = ReadInstruction.from_spec(split).to_absolute(counts)
    except ValueError as error:
        raise UserError(
            f"{split_key}: must be a name, or slices such as train[1000:] or train[:10%], "
            f"got {split!r} ({first_line(error)}); correct it"
        ) from error
    return [(part.splitname, part.from_, max(part.from_, part.to)) for part in parts]


def check_split_names(split: str, names: list[str], split_key: str) -> None:
    """Raise UserError for a split with a name that the source does not have."""
    require(
        set(list_split_names(split)) <= set(names), f"{split_key}: must be one of {', '.join(names)}, got {split!r}"
    )


def select_split(tables: Any, split: str, split_key: str) -> Any:
    """Return the rows of a split from a dictionary of tables, as `resolve_split` names them."""
    split = rename_single(split, list(tables))
    if split in tables:
        return tables[split]
    from datasets import concatenate_datasets

    parts = resolve_split(split, {name: len(table) for name, table in tables.items()}, split_key)
    return concatenate_datasets(
        # `select` refuses an empty range.
        [tables[name].select(range(begin, end) or []) for name, begin, end in parts]
    )

"""Files of the prompts that a training run holds out of its data.

    outputs/train/RUN/held_out.jsonl    for its report, for `infer.eval` and for its warm-up
    outputs/train/RUN/selection.jsonl   for the choice of its checkpoint, and for `infer.tune`

The demo writes no files: its prompts are never in its data. Without files or the demo, the user must name prompts.
"""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data.chat.prepared_prompts import check_prompt_ids, prompt_row_from_prepared
from data.config import DEMO, DataConf, DataSource
from data.eval_prompts.hold_out import prompt_lengths, spread_over_categories
from data.packing.documents import Documents
from data.sources.prepared_rows import HELD_OUT, read_prepared_rows
from data.sources.prompt_formats import NO_CATEGORY, PromptRow
from data.sources.rows import RowRejectedError
from data.sources.splits import list_split_names
from models.io.errors import require
from models.io.files import write_text_atomically
from models.targets.config import TargetConf

log = logging.getLogger(__name__)
FINAL_FILE, SELECTION_FILE = "held_out.jsonl", "selection.jsonl"  # beside the checkpoint folder
RUN_CONFIG = "config.yaml"  # of a training run, beside its checkpoint


@dataclass(kw_only=True)
class HeldOutPrompts:
    """Prompts for choosing a checkpoint (`selection`) and for its report (`final`)."""

    selection: list[PromptRow] = field(default_factory=list)
    final: list[PromptRow] = field(default_factory=list)


def rows_from_documents(documents: Documents, numbers: list[int], origin: str) -> list[PromptRow]:
    """Return the documents' prompts as the token ids that the draft would have trained on."""
    lengths = prompt_lengths(documents)
    return [
        {
            "id": f"document-{number}",
            "category": document.category or NO_CATEGORY,
            "ids": document.ids[: lengths[number]],
            "chat_template": document.conversation is not None,
            "first_question_hash": f"{document.first_question:016x}",
            "held_out_of": origin,
        }
        for number, document in ((number, documents[number]) for number in numbers)
    ]


def rows_from_prepared(
    conf: DataConf, tokenizer: Any, count: int, max_tokens: int | None, vocab_size: int
) -> list[PromptRow]:
    """Return up to `count` prompts that data.prepare held out, spread over all categories."""
    folder, usable_rows = Path(str(conf.path)), []
    is_wanted = conf.source is DataSource.prepared and HELD_OUT not in list_split_names(conf.split) and count > 0
    if not (is_wanted and any(folder.glob(f"{HELD_OUT}-*.parquet"))):
        return []
    rejected: Counter[str] = Counter()
    for row in read_prepared_rows(folder, HELD_OUT):
        row.template = {**conf.template, **row.template}
        try:
            check_prompt_ids(row, tokenizer=tokenizer, max_tokens=max_tokens, vocab_size=vocab_size)
        except RowRejectedError as reason:
            rejected[str(reason)] += 1
        else:
            usable_rows.append(row)
    for reason, num_rejected in rejected.items():
        log.info("data: %d prompts held out from %s are left out: %s", num_rejected, folder, reason)
    _, category = np.unique([row.category for row in usable_rows], return_inverse=True)
    return [
        prompt_row_from_prepared(usable_rows[index]) | {"held_out_of": f"{conf.path} by data.prepare"}
        for index in spread_over_categories(category, min(count, len(usable_rows)))
    ]


def format_data_name(conf: DataConf) -> str:
    """Return the name of the data in reports."""
    names = {
        DataSource.dataset: ":".join(filter(None, [conf.path, conf.subset, conf.split])),
        DataSource.captured: f"the feature store {conf.path}",
    }
    return names.get(conf.source, str(conf.path))


def write_held_out(prompts: HeldOutPrompts, folder: Path) -> None:
    """Write the files of a run that is evaluated on its own data; other runs have none."""
    if not prompts.final:
        return
    for name, rows in ((FINAL_FILE, prompts.final), (SELECTION_FILE, prompts.selection)):
        write_text_atomically(folder / name, "".join(json.dumps(row) + "\n" for row in rows))


def find_held_out_file(directories: Sequence[Path], target: TargetConf, file: str, *, key: str) -> str:
    """Return the path of the prompts that the runs of these checkpoints held out, or `demo` for the demo's.

    Raise UserError if a run left no such file, or if the files of several runs differ.
    """
    paths = {directory: directory.resolve().parent / file for directory in directories}
    held_out = {directory: path for directory, path in paths.items() if path.exists()}
    missing = [directory for directory in directories if directory not in held_out]
    is_demo_target = target.name == DEMO and target.path is None
    for directory in missing:
        require(
            is_demo_target or _read_data_conf(directory).get("source") == DataSource.demo.name,
            f"{key}: must be named for a draft whose run kept no prompts of its own, got null "
            f"and no {paths[directory]}; give {key}=FILE",
        )
    listed = ", ".join(str(held_out.get(directory, "the demo's")) for directory in directories)
    require(
        len({path.read_bytes() for path in held_out.values()}) + bool(missing) <= 1,
        f"{key}: must be named for drafts whose runs held out different prompts, got null and "
        f"{listed}; give {key}=FILE",
    )
    return str(next(iter(held_out.values()), DEMO))


def read_longest_row(directory: Path) -> int | None:
    """Return the length of the draft's longest training row; None if its run does not record it."""
    length = _read_data_conf(directory).get("row_length")
    return length if isinstance(length, int) else None


def _read_data_conf(directory: Path) -> dict[str, Any]:
    """Return the data section of the run's config; empty if the config cannot be read."""
    try:
        conf = yaml.safe_load((directory.resolve().parent / RUN_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    data = conf.get("data") if isinstance(conf, dict) else None
    return data if isinstance(data, dict) else {}

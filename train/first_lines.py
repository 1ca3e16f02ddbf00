"""First log lines of a run: its data, how to replace the answers by the target's own, which recipe fits."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from conf.typed_text import format_overrides
from data.config import DataConf, DataSource, RowFormat
from data.preview import Preview
from models.targets.config import TargetConf
from train.config.optim import OptimName
from train.config.run import TrainConf

log = logging.getLogger(__name__)
SOURCE_KEY = "mixture.sources.rows"  # of mixture=one
PUBLISHED_STEPS = 10_000  # that SpecForge's recipe for EAGLE-3 ends after: docs/recipes.md


def announce_data(conf: TrainConf, preview: Preview) -> None:
    """Log what the data is, and a remedy if its answers may not be the target's own."""
    if not log.isEnabledFor(logging.INFO):  # only the main process logs
        return
    log.info("training data: %s", describe_data(conf.data, preview))
    if conf.data.source is DataSource.demo and not conf.target.is_demo:
        log.warning(
            "these are the demo's prompts, answered by %s: a draft trained on them is of no use for other traffic",
            conf.target.path or conf.target.name,
        )
    if preview.is_author_unknown:
        log.info(
            "these answers are not known to be the target's own, which train a draft best;\n"
            "to have the target answer these prompts (or a server that runs it: "
            "answers=endpoint answers.url=http://localhost:8000/v1)\n    %s\n"
            "and to train on its answers, put this in place of the data and the name of this run:\n"
            "    data=prepared %s",
            prepare_command(conf),
            format_overrides({"data.path": f"outputs/prepare/{own_run(conf)}", "run_name": own_run(conf)}),
        )


def announce_recipe(conf: TrainConf, num_rows: int) -> None:
    """Log the recipe that suits an EAGLE-3 layer with few steps, if another one was chosen."""
    steps = conf.optim.total_steps(num_rows)
    is_made_for_it = steps >= PUBLISHED_STEPS or conf.optim.name is not OptimName.adamw
    # PyTorch/XLA has no Muon, with which that recipe trains.
    if conf.draft.method != "eagle3" or is_made_for_it or not conf.device.is_native:
        return
    log.info(
        "recipe: made for %s steps and more, got %s, in which a draft learns more by recipe=few_answers "
        "(docs/recipes.md)",
        f"{PUBLISHED_STEPS:,}",
        f"{steps:,}",
    )


def describe_data(data: DataConf, preview: Preview) -> str:
    """Describe the rows in a line: source, contents and packing."""
    source = data.path or "the embedded demo"
    parts = [data.subset, data.split] if data.source is DataSource.dataset else []
    if any(parts) and not Path(source).is_file():
        source += f" ({', '.join(filter(None, parts))})"
    contents = [source, preview.kind, preview.turns, f"chat template with {data.template}" if data.template else ""]
    return "; ".join([*filter(None, contents), f"packed into rows of {data.row_length:,} tokens"])


def prepare_command(conf: TrainConf) -> str:
    """Return the command with which the target answers the prompts of this data."""
    data = conf.data
    is_plain = data.format in (RowFormat.text, RowFormat.prompt)
    format_key = data.format.value if is_plain else "messages"
    overrides = {
        f"{SOURCE_KEY}.path": data.path,
        **_changed_values(data, DataConf(), SOURCE_KEY, ("subset", "split", "limit")),
        **({f"+{SOURCE_KEY}.columns.{format_key}": data.column} if data.column is not None else {}),
        **{f"+{SOURCE_KEY}.template.{name}": value for name, value in data.template.items()},
        **_changed_values(conf.target, TargetConf(name=""), "target", vars(conf.target)),
        "answers": "target",
        "run_name": own_run(conf),
    }
    return f"python -m data.prepare mixture=one {format_overrides(overrides)}"


def own_run(conf: TrainConf) -> str:
    """Return the name of a run on the target's own answers: a new one, since this run's data may be prepared itself."""
    return f"{conf.run_name}-own"


def _changed_values(conf: Any, default: Any, group: str, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields that are not at their defaults, by override key."""
    return {f"{group}.{name}": getattr(conf, name) for name in names if getattr(conf, name) != getattr(default, name)}

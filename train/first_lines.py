"""What a run says first: on what it trains, and how to have the target's own answers instead."""

import logging
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conf.entry import typed
from data.config import DataConf, Format, Source
from data.preview import Preview
from data.sources.training_rows import count
from infer.tuning.config import overrides
from models.target.target import TargetConf
from train.config import TrainConf
from train.distributed.torchrun import launcher

log = logging.getLogger(__name__)
SOURCE = "mixture.sources.rows"  # of mixture=one
OF_OTHERS = re.compile(  # what names the data, and the folder of a run
    r"[+~]*(data(\.(source|path|subset|split|format|column|turns|limit|for_any_target|template.*))?"
    r"|run_name)(=.*)?"
)
SERVED = "answers=endpoint answers.url=http://localhost:8000/v1"


def announce(conf: TrainConf, found: Preview) -> None:
    """Name the data, and where nothing says that its answers are the target's own, a remedy."""
    if not log.isEnabledFor(logging.INFO):  # one process speaks for all
        return
    log.info("training data: %s", described(conf.data, found))
    if conf.data.source is Source.demo and not conf.target.is_demo:
        log.warning(
            "these are the demo's prompts, answered by %s: what the draft learns of them is no use "
            "for other traffic", conf.target.path or conf.target.name,
        )  # fmt: skip
    if found.of_others:
        log.info("these answers are not known to be the target's own, which teach a draft best;")
        log.info("to have the target answer these prompts (or a server of it: %s)", SERVED)
        log.info("    %s", preparing(conf))
        log.info("and to train on its answers:")
        log.info("    %s", training(conf))


def described(data: DataConf, found: Preview) -> str:
    """Describe the rows: source, number, contents, and how they are packed."""
    place = data.path or "the embedded demo"
    parts = [part for part in (data.subset, data.split) if part and data.source is Source.dataset]
    named = f"{place} ({', '.join(parts)})" if parts and not Path(place).is_file() else place
    number = count(data)
    said = [f"{number:,} rows" if number else "", found.kind, found.turns]
    said += [f"chat template with {data.template}" if data.template else ""]
    return "; ".join([named, *filter(None, said), f"packed into rows of {data.length:,} tokens"])


def preparing(conf: TrainConf) -> str:
    """Return the command by which the target answers the prompts of this data."""
    return f"python -m data.prepare mixture=one {overrides(dict(_prepared(conf)))}"


def _prepared(conf: TrainConf) -> Iterator[tuple[str, Any]]:
    data = conf.data
    yield f"{SOURCE}.path", data.path
    for key in ("subset", "split", "limit"):
        if getattr(data, key) != getattr(DataConf(), key):
            yield f"{SOURCE}.{key}", getattr(data, key)
    if data.column is not None:
        ours = data.format.value if data.format in (Format.text, Format.prompt) else "messages"
        yield f"+{SOURCE}.columns.{ours}", data.column
    for name, value in data.template.items():
        yield f"+{SOURCE}.template.{name}", value
    for key, usual in vars(TargetConf(name="")).items():
        if getattr(conf.target, key) != usual:
            yield f"target.{key}", getattr(conf.target, key)
    yield "answers", "target"
    yield "run_name", conf.run_name


def training(conf: TrainConf) -> str:
    """This run's command on the answers that `preparing` leaves, on as many processes."""
    kept = [word for word in typed() if not OF_OTHERS.fullmatch(word)]
    answers = {
        "data": "prepared",
        "data.path": f"outputs/prepare/{conf.run_name}",
        "run_name": f"{conf.run_name}-own",
    }
    return f"{shlex.join([*launcher(), '-m', 'train', *kept])} {overrides(answers)}"

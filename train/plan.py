"""`python -m train.plan`: what a run will need, before anything is loaded.

python -m train.plan draft=qwen3-1.7b machine=trn2.48xlarge data=ultrachat
python -m train.plan draft=qwen3-32b-eagle3 machine=trn2.3xlarge tokens=250e6 output=plan.json
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from conf.entry import entry_point
from data.config import Source
from models.checkpoint import output_file
from train.planning.plan import Options, planned
from train.planning.remedies import changes
from train.planning.tables import CONSOLE, as_json, show


@dataclass(kw_only=True)
class PlanConf(Options):
    """All of a run's configuration, where it is to run, and where the plan goes."""

    output: str | None = None  # a file for the plan as JSON


@entry_point("train_plan", PlanConf)
def main(conf: PlanConf) -> None:
    if conf.data.source is Source.captured and not there(conf.data.path):
        CONSOLE.print("data.path: no feature store there, so the target is planned to see the rows")
        conf = replace(conf, data=replace(conf.data, source=Source.prepared))
    plan = planned(conf)
    fixes = [] if plan.fits(plan.best) else changes(plan)
    show(plan, CONSOLE, fixes)
    if conf.output is not None:
        with output_file(conf.output) as file:
            file.write_text(json.dumps(as_json(plan) | {"changes": fixes}, indent=2) + "\n")


def there(store: str | None) -> bool:
    return store is not None and Path(store).is_dir()


if __name__ == "__main__":
    main()

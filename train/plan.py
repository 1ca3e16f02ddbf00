"""`python -m train.plan`: what a run will need, before anything is loaded.

python -m train.plan draft=qwen3-1.7b machine=trn2.48xlarge data=ultrachat
python -m train.plan draft=qwen3-32b-eagle3 machine=trn2.3xlarge tokens=250e6 output=plan.json
"""

import json
from dataclasses import dataclass

from conf.entry import entry_point
from models.checkpoint import output_file
from train.changes import changes
from train.options import Options, planned
from train.plan_tables import CONSOLE, as_json, show


@dataclass(kw_only=True)
class PlanConf(Options):
    """All of a run's configuration, where it is to run, and where the plan goes."""

    output: str | None = None  # a file for the plan as JSON


@entry_point("train_plan", PlanConf)
def main(conf: PlanConf) -> None:
    plan = planned(conf)
    fixes = [] if plan.fits(plan.best) else changes(plan)
    show(plan, CONSOLE, fixes)
    if conf.output is not None:
        with output_file(conf.output) as file:
            file.write_text(json.dumps(as_json(plan) | {"changes": fixes}, indent=2) + "\n")


if __name__ == "__main__":
    main()

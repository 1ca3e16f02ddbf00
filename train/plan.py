"""Plan what a training run needs, before anything is loaded: `python -m train.plan`.

python -m train.plan draft=qwen3-1.7b machine=trn2.48xlarge data=ultrachat
python -m train.plan draft=qwen3-32b-eagle3 machine=trn2.3xlarge tokens=250e6
"""

from dataclasses import replace
from pathlib import Path

from conf.entry import entry_point
from data.config import DataSource
from models.io.console import print_line
from train.config.run import TrainPlanConf


@entry_point("train_plan", TrainPlanConf)
def main(conf: TrainPlanConf) -> None:
    has_store = conf.data.path is not None and Path(conf.data.path).is_dir()
    if conf.data.source is DataSource.captured and not has_store:
        print_line("data.path: no feature store there, so the plan is that of one by the defaults of data.capture")
        conf = replace(conf, data=replace(conf.data, path=None))
    conf.check_settings()
    from train.planning.choice import plan_run
    from train.planning.tables import print_plan

    print_plan(plan_run(conf))


if __name__ == "__main__":
    main()

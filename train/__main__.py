"""Distill a draft from its target and measure what it gains: `python -m train`.

Without arguments it runs the embedded demo on a laptop. After a kill, the same command continues the run.
"""

from conf.entry import entry_point
from models.io.console import setup_logging
from train.config.run import TrainConf
from train.preflight import preflight


@entry_point("train", TrainConf)
def main(conf: TrainConf) -> None:
    setup_logging()
    run = preflight(conf)
    from train.distillation import distill_draft

    distill_draft(run)


if __name__ == "__main__":
    main()

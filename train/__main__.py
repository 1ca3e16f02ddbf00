"""Distill a draft from its target and measure what it gains: `python -m train`.

Without arguments it runs the embedded demo on a laptop. After a kill, the same command continues
the run.
"""

from conf.entry import entry_point
from models.console import setup_logging
from train.config.run import TrainConf


@entry_point("train", TrainConf)
def main(conf: TrainConf) -> None:
    setup_logging()
    conf.check_settings()
    conf.log.check_wandb()
    from data.sources.training_rows import check_reachable

    check_reachable(conf.data, conf.target, conf.draft.pretrained)
    from train.checks import check_run

    preview = check_run(conf)
    from train.distillation import distill_draft

    distill_draft(conf, preview)


if __name__ == "__main__":
    main()

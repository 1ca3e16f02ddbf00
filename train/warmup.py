"""Compile everything that a training run and its evaluation need, before the run.

python -m train.warmup draft=NAME ...       with the arguments of `python -m train`

Graphs last as long as the compiler's cache does (docs/graphs.md). No run folder is written.
"""

from conf.entry import entry_point
from models.io.console import setup_logging
from train.config.run import TrainConf
from train.preflight import preflight


@entry_point("train_warmup", TrainConf)
def main(conf: TrainConf) -> None:
    setup_logging()
    run = preflight(conf, is_warmup=True)
    from train.graph_warmup import warm_up_run

    warm_up_run(run.conf, run.parallel)


if __name__ == "__main__":
    main()

"""`python -m data.prepare`: build one folder of training data from prompts of many sources.

python -m data.prepare                       the demo's prompts, answered by the demo's target
python -m data.prepare mixture=one mixture.sources.rows.path=FILE run_name=mine
python -m data.prepare mixture=chat workers=4 worker=0
python -m data.prepare mixture=chat target=qwen3-32b answers=target parallel.tensor=8
python -m data.prepare mixture=chat target=qwen3-8b answers=endpoint answers.url=http://host:8000/v1

The same command resumes a run that was killed and keeps its finished answers.
"""

from conf.entry import entry_point, is_sweep
from data.prepare_config import PrepareConf
from models.command_processes import start_processes
from models.io.console import setup_logging


@entry_point("prepare", PrepareConf)
def main(conf: PrepareConf) -> None:
    setup_logging()
    conf.log.check_wandb()
    from data.sources.open_rows import check_source_path

    for name, source in conf.mixture.sources.items():
        check_source_path(source.path, f"mixture.sources.{name}.path")
    start_processes(conf.parallel, conf.device, conf.target, is_sweep=is_sweep())
    from data.preparation import prepare_rows

    prepare_rows(conf)


if __name__ == "__main__":
    main()

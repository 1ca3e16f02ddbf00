"""Choose the tree or window that is fastest for this device, draft and traffic.

python -m infer.tune checkpoint=DIR
python -m infer.tune checkpoint=DIR timing=false nodes=[24]
python -m infer.tune checkpoint=[A,B] batch=[1,8] context=[1024,8192] prompts=mine.jsonl

The search is in `infer/tuning/search.py`. Limits of the method: docs/tuning.md.
"""

from pathlib import Path

from conf.entry import entry_point
from infer.inputs.command_start import start_command
from infer.tuning.config import TuneConf
from models.io.console import setup_logging
from models.io.lock import claim_run_folder


@entry_point("tune", TuneConf)
def main(conf: TuneConf) -> None:
    setup_logging()
    conf.log.check_wandb()
    directories = start_command(conf, conf.prompts, prompts_key="prompts")
    run = Path(conf.output_dir) / conf.run_name
    claim_run_folder(run)
    from infer.commands.tree_tuning import tune_checkpoints

    tune_checkpoints(conf, directories, run)


if __name__ == "__main__":
    main()

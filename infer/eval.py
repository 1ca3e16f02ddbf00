"""Evaluate drafts on held-out prompts, one or several side by side.

python -m infer.eval                        the newest finished training run
python -m infer.eval checkpoint=DIR tree=chain
python -m infer.eval checkpoint=[DIR,DIR]
python -m infer.eval tune=true              also the tree that this device wants
"""

from pathlib import Path

from conf.entry import entry_point
from infer.config import EvalConf
from infer.inputs.command_start import start_command
from models.io.console import setup_logging
from models.io.lock import claim_run_folder


@entry_point("eval", EvalConf)
def main(conf: EvalConf) -> None:
    setup_logging()
    conf.log.check_wandb()
    directories = start_command(conf, conf.evaluation.prompts)
    run = Path(conf.output_dir) / conf.run_name
    claim_run_folder(run)
    from infer.commands.evaluation import evaluate_checkpoints

    evaluate_checkpoints(conf, directories, run)


if __name__ == "__main__":
    main()

"""Compile all graphs that `infer.eval` needs, so that the evaluation itself compiles nothing.

python -m infer.warmup checkpoint=DIR tree=NAME ...       with the arguments of `infer.eval`

Graphs last as long as the compiler's cache does (device.cache_dir): docs/graphs.md. Nothing else is written.
"""

from conf.entry import entry_point
from infer.config import EvalConf
from infer.inputs.command_start import start_command
from models.io.console import setup_logging


@entry_point("eval_warmup", EvalConf)
def main(conf: EvalConf) -> None:
    setup_logging()
    directories = start_command(conf, conf.evaluation.prompts)
    from infer.inputs.command_inputs import load_evaluation
    from infer.measure.evaluate import compile_eval_graphs
    from models.parallel.processes import leave_processes

    target, drafts, evaluation = load_evaluation(conf, directories)
    compile_eval_graphs(target, drafts, tree=conf.tree, conf=evaluation)
    leave_processes()


if __name__ == "__main__":
    main()

"""Judge drafts on held-out prompts, one or several side by side.

python -m infer.eval                        the newest finished training run
python -m infer.eval checkpoint=DIR tree=chain
python -m infer.eval checkpoint=[DIR,DIR]
"""

from pathlib import Path

from rich.console import Console

from conf.entry import entry_point
from infer.candidates import check, load
from infer.checkpoints import make_writable, opened
from infer.config import EvalConf
from infer.measure.evaluate import evaluate
from infer.report.tables import terminal_table
from infer.report.write import write
from models import checkpoint


@entry_point("eval", EvalConf)
def main(conf: EvalConf) -> None:
    say = Console(soft_wrap=True).print
    directories = opened(conf.checkpoint, say)
    run = Path(conf.output_dir) / conf.run_name
    check(conf)
    make_writable(run)
    target, judged, evaluation = load(conf, directories)
    report = evaluate(target, judged, tree=conf.tree, conf=evaluation, say=say)
    with checkpoint.writing(run):
        write(report, run)
    terminal_table(report)
    say(f"report: {run / 'report.html'}")


if __name__ == "__main__":
    main()

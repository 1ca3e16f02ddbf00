"""Write time, memory and disk of each sequence into docs/sequences.md, by the plan shown there.

python -m scripts.sequences --write [NAME ...]
"""

import re
import sys
from pathlib import Path

from conf.entry import compose
from conf.sequences import list_sequences
from data.prepare_config import AnswersConf
from scripts.benchmarks.tables import replaced
from train.config.run import TrainPlanConf
from train.planning.choice import plan_run
from train.planning.run_plan import MachinePlan
from train.planning.tables import format_duration, format_gib, planned_steps, tokens_per_step
from train.run.folder import disk_bytes_needed

PAGE = Path(__file__).parent.parent / "docs" / "sequences.md"
BATCH = AnswersConf().batch


def main() -> None:
    if sys.argv[1:2] != ["--write"]:
        sys.exit(__doc__)
    for name in sys.argv[2:] or list_sequences():
        text = render_plan(name)
        print(f"{name}: {text}")
        PAGE.write_text(replaced(PAGE.read_text(), name, text))


def render_plan(name: str) -> str:
    """Return the figures of a sequence as Markdown, planned as its section says."""
    [words] = re.findall(rf"python -m train\.plan (experiment={name} .*)", PAGE.read_text())
    plan = plan_run(compose("train_plan", TrainPlanConf, words.split()))
    return "\n".join([f"* {describe_answers(plan)}", f"* {describe_training(plan)}"])


def describe_answers(plan: MachinePlan) -> str:
    """Describe what the answers cost on one core, which reads the target's weights every round."""
    (target, _), tokens = plan.models, plan.conf.tokens or 0
    size = target.num_parameters * plan.dtype.itemsize
    start = f"answers: {tokens / 1e6:g} M tokens, "
    if size > plan.byte_limit:
        weights = f"{size / 1e9:.0f} GB of weights do not fit one core"
        return f"{start}by a server, or by several cores (`parallel.tensor=n`), because {weights}"
    seconds = tokens / BATCH * size / plan.machine.core_bandwidth
    return f"{start}at best {format_duration(seconds)} by one process with {BATCH} rows at a time"


def describe_training(plan: MachinePlan) -> str:
    """Describe the layout that the plan proposes, and what it takes."""
    (target, draft), best, layout = plan.models, plan.best, plan.best.layout
    assert plan.fits(best), f"{plan.conf.run_name}: must fit"
    seconds, steps = max(best.step_time.values()), planned_steps(plan) or 0
    keys = " ".join([f"parallel.tensor={layout.tensor}", *plan.choices])
    tensor = f" with `{keys}`" if layout.tensor > 1 or plan.choices else ""
    return (
        f"training: {layout.processes} processes{tensor}, {format_gib(best.peak_bytes)} of "
        f"{format_gib(plan.byte_limit)} usable GiB a core; at best {format_duration(seconds)} a "
        f"step of {tokens_per_step(plan):,} tokens and {format_duration(steps * seconds)} for "
        f"{steps:,} steps; {disk_bytes_needed(draft, target) / 1e9:.1f} GB of states and checkpoints"
    )


if __name__ == "__main__":
    main()

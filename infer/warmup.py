"""Compile everything that `infer.eval` will need, so that the evaluation itself compiles nothing.

python -m infer.warmup checkpoint=DIR tree=NAME ...       what `infer.eval` takes

Each graph is printed with the time that it took. Graphs last as long as the compiler's cache does
(device.cache_dir): docs/graphs.md. Nothing is written beside it.
"""

from collections.abc import Callable

from rich.console import Console

from conf.entry import entry_point
from infer.candidates import check, load
from infer.checkpoints import opened
from infer.config import EvalConf, EvaluationConf
from infer.measure import batched
from infer.measure.eval_modes import Candidate, contenders
from infer.measure.evaluate import asked, choose_few
from infer.measure.exactness import measure_yardstick
from infer.measure.timing import FEWEST, warm_unfused
from models.speculate.tree import Tree, TreeConf
from models.target.target import Target


def warm(
    target: Target, candidates: list[Candidate], *, tree: TreeConf, conf: EvaluationConf,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Call every function of an evaluation once in each of its shapes."""
    if not target.device.static:
        say("graphs: nothing is compiled here")
        return
    with target.device.shared_if_worth(target.parameters // target.num_layers):
        _compile(target, candidates, tree.build(), conf, say)


def _compile(
    target: Target, candidates: list[Candidate], shape: Tree, conf: EvaluationConf,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    prompts, needed = asked(target, candidates, shape, conf)
    with target.device.expecting(needed, say, each=say):
        modes = contenders(target, candidates, shape, prompts, conf)
        few = choose_few(prompts)
        for name, mode in modes.items():
            if name == mode.baseline:  # what answers are compared by needs passes of its own
                measure_yardstick(mode.decoder, few, max_new_tokens=conf.new_tokens)
            for prompt in few:
                count = min(FEWEST, conf.new_tokens)
                mode.decoder.decode([prompt.ids], row_ids=[0], max_new_tokens=count)
        timed = [mode for mode in modes.values() if mode.timed]
        warm_unfused(timed, few[0], max_new_tokens=conf.new_tokens)
        for one in candidates:
            for batch in conf.batches:
                batched.warmed(one.target or target, one, shape, prompts, conf, batch)


@entry_point("eval_warmup", EvalConf)
def main(conf: EvalConf) -> None:
    say = Console(soft_wrap=True, highlight=False).print
    directories = opened(conf.checkpoint, say)
    check(conf)
    target, judged, evaluation = load(conf, directories)
    warm(target, judged, tree=conf.tree, conf=evaluation, say=say)


if __name__ == "__main__":
    main()

"""Compile the graphs of an evaluation ahead of it."""

import itertools

from infer.config import EvaluationConf
from infer.measure.batched import build_decoders, warm_up_decoders
from infer.measure.eval_modes import DraftUnderTest
from infer.measure.evaluate import plan_evaluation, warm_up_modes
from infer.measure.timing import warm_up_unfused
from models.io.console import print_line
from models.targets.target import Target
from models.trees.config import TreeConf


def compile_eval_graphs(target: Target, drafts: list[DraftUnderTest], *, tree: TreeConf, conf: EvaluationConf) -> None:
    """Compile the graphs of an evaluation by calling every function once in each of its shapes."""
    if not target.device.has_static_shapes:
        print_line("graphs: none to compile, because compiling is off on this device")
        return
    shape = tree.build()
    with target.device.cpu_threads_for(target.num_parameters // target.num_layers):
        prompts, modes, graphs = plan_evaluation(target, drafts, shape, conf)
        with target.device.expect_graphs(graphs, print_line):
            warm_up_modes(modes, prompts, conf)
            timed = [mode for mode in modes.values() if mode.timed and conf.phases]
            warm_up_unfused(timed, prompts[0], max_new_tokens=conf.new_tokens)
            for draft, batch in itertools.product(drafts, conf.batch_sizes):
                decoders = build_decoders(target, draft, shape, prompts, conf, batch)
                warm_up_decoders(decoders.values(), prompts, conf)

"""Which graphs a training run will need, from its configuration alone.

    loss       the draft's loss of a micro-batch, and its gradient
    features   the target's pass over rows: a micro-batch, or a group to be kept; none from a store

Where operations are recorded, both are part of one graph, `optimizer_step`; `start` makes the
optimizers' moments before it, and `see` is the pass over rows to be kept.

What is decoded on the way, to measure the draft or to let it write texts itself, is decoded
eagerly; the evaluation at the end announces its own.
"""

from data.config import Source
from models.device.graph_budget import Graph
from train.config import TrainConf
from train.distributed.torchrun import launched


def compiles_features(conf: TrainConf) -> bool:
    """Whether the target's pass is one graph: not where hooks gather its weights on the way."""
    return conf.optim.compile and not conf.parallel.splits_target


def graphs(conf: TrainConf, *, lazy: bool = False) -> set[Graph]:
    """All that train/loop.py calls, on each process; `lazy`: Device.lazy."""
    micro = conf.optim.at_a_time(conf.optim.rows // (launched() // conf.parallel.tensor))
    if lazy:
        kept = {Graph("see")} if conf.data.keep_features else set()
        return {Graph("start"), Graph("optimizer_step")} | kept
    found: set[Graph] = set()
    if conf.optim.compile:
        found.add(Graph("loss", (micro, conf.data.length)))
    if compiles_features(conf) and conf.data.source is not Source.captured:
        sizes = {conf.optim.batch_size} if conf.data.keep_features else {micro}
        if conf.data.on_policy.share:  # what the draft wrote is not kept
            sizes.add(micro)
        found |= {Graph("features", (rows, conf.data.length)) for rows in sizes}
    return found

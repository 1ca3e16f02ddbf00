"""List the graphs that a training run needs, which depend only on its configuration.

    loss_terms       the draft's layers over a micro-batch, and their gradient
    evaluate_chunk   the loss of a chunk of its tokens, and its gradient; one more for an adapted target's own head
    run_target       the target's pass over rows: a micro-batch, or a group to keep; not with a store

On a lazy device all are part of one graph, `train_step`; `compute_features` is the pass over rows to keep. Decoding
during training is eager; the evaluation at the end announces its own graphs.
"""

from data.config import DataSource
from models.device.graph_budget import Graph
from models.parallel.torchrun import get_world_size
from train.config.run import TrainConf, Weights
from train.distributed.deal import deal_rows


def compiles_features(conf: TrainConf) -> bool:
    """Return whether the target's pass is one graph: hooks that gather sharded weights break it."""
    return conf.optim.compile_loss and conf.parallel.target is not Weights.sharded


def list_graphs(conf: TrainConf, *, lazy: bool = False, processes: int | None = None) -> set[Graph]:
    """Return the graphs that train/trainer.py calls on each of the processes, by default those that were launched.

    `lazy` is Device.lazy.
    """
    processes, tensor = processes or get_world_size(), conf.parallel.tensor_size
    deal = deal_rows(conf, groups=processes // tensor, tensor=tensor)
    micro_batch_size = conf.optim.micro_batch_rows(deal.rows)
    if lazy:
        names = {"allocate_optimizer_states", "train_step"}
        return {Graph(name) for name in names | ({"compute_features"} if conf.data.keep_features else set())}
    graphs = set()
    gathers_head = processes > 1 and conf.parallel.target is Weights.sharded  # see Parallel.compiles_loss
    if conf.optim.compile_loss and not gathers_head:
        graphs = {Graph("loss_terms", (micro_batch_size, conf.data.row_length))}
        graphs |= {Graph("evaluate_chunk", (term,)) for term in range(1 + conf.draft.trains_target)}
    if compiles_features(conf) and conf.data.source is not DataSource.captured:
        graphs |= {Graph("run_target", (micro_batch_size, conf.data.row_length))}
    return graphs

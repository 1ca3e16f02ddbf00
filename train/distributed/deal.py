"""The rows of a step that each process learns."""

from dataclasses import dataclass
from math import gcd

from train.config.run import TrainConf, Weights


@dataclass(frozen=True, kw_only=True)
class RowDeal:
    """The rows of a step, dealt to tensor groups, and those of a group to `parts` of its members.

    A group runs the target over all its rows together; each part then learns its own. Members of a part repeat each
    other, which gives all processes equal weight in the mean of the gradients.
    """

    parts: int  # of a group
    copies: int  # members of a part
    rows: int  # of a part
    is_even: bool  # each process has rows of its own, or rows are not dealt to members here


def deal_rows(conf: TrainConf, *, groups: int, tensor: int) -> RowDeal:
    """Deal the rows of a step to `groups` of `tensor` processes, as evenly as their number allows.

    Members repeat each other where a graph of PyTorch/XLA holds a whole step, which must be the same on all of them,
    and where the target is sharded, too, since its embeddings and head then read the same rows.

    >>> from train.config.optim import OptimConf
    >>> conf = TrainConf(run_name="", optim=OptimConf(rows_per_step=8))
    >>> [deal_rows(conf, groups=groups, tensor=8) for groups in (1, 2)]
    [RowDeal(parts=8, copies=1, rows=1, is_even=True), RowDeal(parts=4, copies=2, rows=1, is_even=False)]
    """
    rows = conf.optim.rows_per_step // groups
    is_dealt = conf.device.is_native and conf.parallel.target is not Weights.sharded
    parts = gcd(rows, tensor) if is_dealt else 1
    return RowDeal(parts=parts, copies=tensor // parts, rows=rows // parts, is_even=parts == tensor or not is_dealt)

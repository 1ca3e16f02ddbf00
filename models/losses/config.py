"""The options of a distillation loss."""

from dataclasses import dataclass, replace
from enum import Enum

from models.io.errors import POSITIVE, Rule, at_least, check_values


class LossName(Enum):
    """The loss function."""

    soft_ce = "soft_ce"
    forward_kl = "forward_kl"
    reverse_kl = "reverse_kl"
    jsd = "jsd"
    tv = "tv"
    ce = "ce"
    lk_hybrid = "lk_hybrid"
    topk_kl = "topk_kl"


class Reduction(Enum):
    """The unit of equal weight: every sequence or every token."""

    sequence = "sequence"
    token = "token"


@dataclass(kw_only=True)
class LossConf:
    """The loss function, its parameters, and the weights of steps and tokens."""

    name: LossName = LossName.lk_hybrid
    beta: float = 0.5  # of jsd: 0 is the forward KL, 1 the reverse KL
    lk_eta: float = 3.0  # of lk_hybrid
    top_k: int = 10  # of topk_kl
    temperature: float = 1.0  # of both models, also in the metric alpha
    step_decay: float = 0.8  # weight of a drafted position / weight of the one before
    reduction: Reduction = Reduction.sequence
    on_prompts: bool = False  # the tokens of prompts are learned like those of answers
    logits_chunk: int = 1024  # tokens whose logits are held at a time

    graph_key = property(str)  # every value is a constant of the graphs: see models/device/graph_budget.py

    def __post_init__(self) -> None:
        check_values(
            self,
            "loss",
            beta=Rule("must be in [0, 1]", lambda value: 0 <= value <= 1, "the default is 0.5"),
            lk_eta=at_least(0, "the default is 3"),
            top_k=at_least(1, "the default is 10"),
            temperature=replace(POSITIVE, remedy="the default is 1"),
            step_decay=Rule("must be in (0, 1]", lambda value: 0 < value <= 1, "1 weighs steps equally"),
            logits_chunk=at_least(1, "the default is 1024"),
        )

"""The training loss of a draft: the sum of its terms, with vocabulary heads applied in chunks."""

from collections.abc import Callable

from torch import Tensor, nn

from models.batch import Batch
from models.device.device import Device
from models.drafts.base import Draft, Extras, Loss, LossTerms
from models.losses.chunked import ChunkEvaluator, chunked_distillation_loss, evaluate_chunk
from models.targets.language_model import TargetOutput


class LossModule(nn.Module):
    """A draft whose forward pass is its loss: the module that Accelerate wraps and casts.

    Compiled, it is two graphs, since one of both would hold every chunk of the loss and compile as often.
    """

    def __init__(self, draft: Draft, device: Device, *, compiled: bool):
        super().__init__()
        self.draft = draft
        self.loss_terms: Callable[..., LossTerms] = draft.loss_terms
        self.evaluate_chunk: ChunkEvaluator = evaluate_chunk
        if compiled:
            self.loss_terms = device.compile_part(draft.loss_terms)
            self.evaluate_chunk = device.compile_part(evaluate_chunk)

    def forward(self, batch: Batch, target_output: TargetOutput, extras: Extras) -> Loss:
        return compute_loss(self.loss_terms(batch, target_output, **extras), self.evaluate_chunk)


def compute_loss(terms: LossTerms, evaluate: ChunkEvaluator = evaluate_chunk) -> Loss:
    """Apply the heads, by `evaluate_chunk` or what a compiler made of it, and add up all terms.

    The names of metrics of several steps end with the step's number.
    """
    total, metrics = terms.total, terms.metrics
    for term in terms.heads:
        inputs = {name: value for name, value in vars(term).items() if name not in ("scale", "prefix")}
        term_total, term_metrics = chunked_distillation_loss(**inputs, evaluate=evaluate)
        total = total + term.scale * term_total
        for name, pairs in term_metrics.items():
            by_step = {"": pairs} if pairs.ndim == 1 else {f"_{i + 1}": pair for i, pair in enumerate(pairs)}
            metrics = metrics | {f"{term.prefix}{name}{step}": pair for step, pair in by_step.items()}
    assert isinstance(total, Tensor)
    return Loss(total=total, weight=terms.weight, metrics=metrics)

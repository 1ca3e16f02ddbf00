"""One training step and one evaluation, traced on tensors without memory: what each phase holds.

The phases are the run's own: the target reads a batch (none where a feature store has its rows),
the draft learns from what it saw, the optimizer steps; and every so often held-out prompts are read
and decoded. Only one is under way at a time, on top of what stays: the weights and the optimizer's
moments.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from data.features.schema import Layout as Stored
from data.features.schema import TeacherKind
from infer.engine import rounds
from infer.engine.decode import Decoder, bucket
from models.device.memory_trace import Phase, Tally, imagined
from models.distill.topk_logits import TopK
from models.drafts.base import Batch, Draft, Needs
from models.meta_model import Outline, models_of
from models.target.language_model import Seen
from train.config import TrainConf
from train.run_dir import learning

TARGET, FROZEN, TRAINED = "target", "draft, frozen", "draft, trained"
GRADIENTS, OPTIMIZER, CACHE = "gradients", "optimizer", "cache"
STAYS = (TARGET, FROZEN, TRAINED, OPTIMIZER)
SEES, LEARNS, STEPS, EVALUATES = "target reads", "draft learns", "optimizer steps", "evaluation"


@dataclass(kw_only=True)
class Trace:
    """What a run of one process does, phase by phase."""

    phases: dict[str, Phase]
    tokens: int  # of a batch

    @property
    def fullest(self) -> Phase:
        return max(self.phases.values(), key=lambda phase: phase.total)

    def peak(self, *parts: str) -> int:
        """Bytes of some parts at the fullest moment of a training step."""
        phases = [phase for name, phase in self.phases.items() if name != EVALUATES]
        return max(sum(phase.held[part] for part in parts) for phase in phases)


def trace(
    conf: TrainConf, target: Outline, draft: Draft, *, prompt: int, foreach: bool = False,
    stored: Stored | None = None,
) -> Trace:  # fmt: skip
    """With held-out prompts of `prompt` tokens; accelerators step by `foreach`.

    `stored`: what a feature store holds of each token, where rows are read from one.
    """
    vocab = {target.vocab_size} | ({len(draft.kept_ids)} if draft.kept_ids is not None else set())
    with imagined([target.model, *models_of(draft)], vocab=vocab) as tally:
        _name_weights(tally, target, draft)
        batch = fullest_batch(conf.optim.batch_size, conf.data.length)
        phases, optimizers = _learning(
            tally, conf, target, draft.eval(), batch, foreach=foreach, stored=stored
        )
        phases.append(_evaluating(tally, conf, target, draft.eval(), prompt=prompt))
        del optimizers  # what they hold was held until here
    return Trace(phases={phase.name: phase for phase in phases}, tokens=batch.ids.numel())


def lasting(conf: TrainConf, target: Outline, draft: Draft) -> Phase:
    """What every training step holds, whatever its rows: a fraction of a second to find out."""
    with imagined([target.model, *models_of(draft)], vocab=[]) as tally:
        _name_weights(tally, target, draft)
        optimizers = _moments(tally, conf, draft, foreach=False)
        stays = Counter({part: tally.live[part] for part in STAYS})
        del optimizers  # what they hold was held until here
    stays[GRADIENTS] = stays[TRAINED]
    return Phase(name=LEARNS, held=stays)


def fullest_batch(rows: int, length: int) -> Batch:
    """One document a row, every token of it an answer: nothing needs more."""
    ids = torch.zeros(rows, length, dtype=torch.int64)
    return Batch(
        ids=ids, answer=torch.ones_like(ids, dtype=torch.bool), document=torch.zeros_like(ids),
        positions=torch.arange(length).expand_as(ids).clone(),
    )  # fmt: skip


def _name_weights(tally: Tally, target: Outline, draft: Draft) -> None:
    tally.hold(FROZEN, [*draft.parameters(), *draft.buffers()])
    tally.hold(TRAINED, learning(draft))
    tally.hold(TARGET, [*target.model.parameters(), *target.model.buffers()])


def _learning(
    tally: Tally, conf: TrainConf, target: Outline, draft: Draft, batch: Batch, *, foreach: bool,
    stored: Stored | None,
) -> tuple[list[Phase], list[Optimizer]]:  # fmt: skip
    """As train/loop.py does it. A second micro-batch finds the gradients of the first."""
    trained = learning(draft)
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(_named(tally))
    optimizers = _moments(tally, conf, draft, foreach=foreach)
    if conf.optim.accumulation > 1:
        _gradients(tally, trained)
    phases = _micro_batch(tally, target, draft, batch, stored)
    with tally.phase(STEPS) as steps:
        torch.nn.utils.clip_grad_norm_(trained, conf.optim.clip)
        for optimizer in optimizers:
            optimizer.step()
    draft.zero_grad()
    return [*phases, steps], optimizers


def _micro_batch(
    tally: Tally, target: Outline, draft: Draft, batch: Batch, stored: Stored | None
) -> list[Phase]:
    half = target.device.dtype is torch.bfloat16
    phases: list[Phase] = []
    if stored is None:
        with tally.phase(SEES) as sees, torch.no_grad():
            seen = target.see(
                batch.ids, positions=batch.positions, mask=batch.attends(),
                layers=draft.needs.layers,
            )  # fmt: skip
        phases.append(sees)
    else:
        seen = read_rows(stored, draft.needs, batch.ids.shape, target.device.dtype)
    with tally.phase(LEARNS) as learns:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = draft.loss(batch, seen)
        loss.total.backward()
    return [*phases, learns]


def read_rows(stored: Stored, needs: Needs, shape: torch.Size, dtype: torch.dtype) -> Seen:
    """Of the shapes that data/features/reader.py gives rows in."""
    wide, k, teacher = stored.hidden_size, stored.top_k, None
    if stored.teacher is TeacherKind.topk:
        teacher = TopK(
            ids=torch.zeros(*shape, k, dtype=torch.int64), log_probs=torch.zeros(*shape, k),
            rest=torch.zeros(shape), vocab=stored.vocab_size,
        )  # fmt: skip
    hidden = wide if needs.hidden or teacher is None else 0
    return Seen(
        captured=torch.zeros(*shape, len(needs.layers) * wide, dtype=dtype),
        hidden=torch.zeros(*shape, hidden, dtype=dtype), teacher=teacher,
    )  # fmt: skip


def _moments(tally: Tally, conf: TrainConf, draft: Draft, *, foreach: bool) -> list[Optimizer]:
    """Optimizers that have stepped before: what they keep is made in the first step."""
    optimizers, _ = conf.optim.build(draft)
    _gradients(tally, learning(draft))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["foreach"] = foreach
        optimizer.step()
        kept = [value for state in optimizer.state.values() for value in state.values()]
        tally.hold(OPTIMIZER, [value for value in kept if isinstance(value, Tensor)])
    draft.zero_grad()
    return optimizers


def _gradients(tally: Tally, trained: list[nn.Parameter]) -> None:
    """As an earlier micro-batch leaves them."""
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    tally.hold(GRADIENTS, [parameter.grad for parameter in trained])


def _named(tally: Tally) -> Callable[[Tensor], None]:
    return lambda parameter: tally.hold(GRADIENTS, [parameter.grad])


def _evaluating(
    tally: Tally, conf: TrainConf, target: Outline, draft: Draft, *, prompt: int
) -> Phase:
    """All held-out prompts are read together, and the draft after them: train/quick_eval.py."""
    rows, tree = conf.eval_prompts, conf.tree.build()
    with tally.phase(EVALUATES) as found, torch.no_grad():
        decoder = Decoder(
            draft.verifier(target) or target, draft, tree, sampling=conf.evaluation.sampling,
            slots=prompt + conf.evaluation.quick_tokens, batch=rows,
        )  # fmt: skip
        cache = decoder.cache
        tally.hold(CACHE, [*cache.keys, *cache.values])
        ids = torch.zeros(rows, min(bucket(prompt), decoder.slots), dtype=torch.int64)
        lengths = torch.full((rows,), prompt)
        seen, _, scores, _ = rounds.prefill(
            decoder.target, cache, decoder.layers, decoder.plan.rule, ids, lengths, lengths
        )
        assert decoder.draft is not None
        first = scores.argmax(-1)
        decoder.draft.start(decoder.state, ids, lengths=lengths, first=first, seen=seen)
    return found

"""Which graphs an evaluation will need, from its configuration and the lengths of its prompts.

    prefill  one a padded prompt length       begin  the same, for each draft and tree
    fused    a round, one a decoder           score, accept, move, go_on  its parts, to be timed
    room, opened, blank, put    what lies between them, where operations are recorded (Device.glue)

Decoders whose functions take arguments of equal shapes share graphs, so the graphs of a run are a
set. No model is looked at, only what is known of it: a plan can be made before anything is loaded.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from infer.config import EvaluationConf
from infer.engine.decode import ALONE, bucket, held_slots
from infer.engine.rounds import Plan
from infer.verify import Verification, Verifier, build
from models.device.graph_budget import KIND, Graph, key_of
from models.drafts.base import Draft
from models.drafts.mixed import MixedDraft
from models.drafts.ngram import NgramDraft
from models.speculate.sampling import SamplingConf
from models.speculate.tree import NO_TREE, Tree, TreeConf, TreeKind
from models.target.target import Target


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """A draft, as far as graphs depend on it."""

    kind: str  # Draft.kind
    layers: tuple[int, ...]  # that it captures of the target
    sizes: str = ""  # equal for drafts of one kind whose tensors are of equal shapes
    target: str = ""  # equal for those that the same weights verify; "" are the original's

    @classmethod
    def of(cls, draft: Draft, own: Target | None) -> "Drafting":
        """Of a draft that is there, and the target that its method adapted."""
        return cls(
            kind=draft.kind, layers=tuple(draft.needs.layers), sizes=key_of(draft),
            target=own.fingerprint if own else "",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """A decoder, as far as graphs depend on it."""

    drafting: Drafting
    tree: Tree
    slots: int
    sampling: SamplingConf = field(default_factory=SamplingConf)
    verifier: Verifier | None = None
    batch: int = 1

    @property
    def plan(self) -> Plan:
        verifier = self.verifier or build(Verification.auto, self.sampling)
        return Plan(rule=self.sampling.build(), verifier=verifier, tree=self.tree, vocab=0)

    @property
    def kind(self) -> str:
        one = self.drafting.kind
        return f"{MixedDraft.method}_{one}" if self.tree.copied and one != ALONE else one

    def graphs(
        self, prompts: Iterable[int], *, fused: bool = True, unfused: bool = False,
        lazy: bool = False,
    ) -> Iterator[Graph]:  # fmt: skip
        """Of prompts of these lengths, in fused rounds, in unfused ones, or in both.

        `lazy`: Device.lazy.
        """
        one, plan, held = self.drafting, self.plan, held_slots(self.tree, self.slots)
        target = (one.target, one.layers, held)
        draft = (one.sizes, one.layers, held, plan.graph_key)
        drafts = one.kind != ALONE
        for places in sorted({min(bucket(length), self.slots) for length in prompts}):
            yield Graph("prefill", (*target, plan.rule.graph_key, places))
            if drafts:
                yield Graph(f"begin{KIND}{self.kind}", (*draft, places))
        if fused:
            yield Graph(f"fused{KIND}{self.kind}", (target, draft, self.batch))
        if unfused:
            rows = (self.batch, held, plan.ahead, plan.moved, plan.rule.penalises)
            proposal = (self.tree.size, plan.verifier.draws(self.tree))
            yield Graph("score", (*target, *rows, *proposal))
            yield Graph("accept", (one.layers, *rows, *proposal, plan.graph_key))
            if plan.moved:
                yield Graph("move", rows)
            if drafts:
                yield Graph(f"go_on{KIND}{self.kind}", (*draft, self.batch))
        if lazy:
            yield from self._glue(held)

    def _glue(self, held: int) -> Iterator[Graph]:
        one, plan = self.drafting, self.plan
        kept = (one.target, self.kind, one.sizes, held)
        rows = (plan.ahead, plan.moved, plan.rule.graph_key, held)
        for batch in {1, self.batch}:
            yield Graph("room", (*kept, batch))
        yield Graph("opened", rows)
        if self.batch > 1:
            proposal = (self.tree.size, plan.verifier.draws(self.tree), self.batch)
            yield Graph("blank", (*rows, *proposal))
            yield Graph("put", (*kept, *rows, *proposal))


def evaluation(
    drafts: Sequence[Drafting], *, tree: Tree, prompts: Sequence[int], conf: EvaluationConf,
    fused: bool = True, lazy: bool = False,
) -> set[Graph]:  # fmt: skip
    """Collect the graphs of infer/measure/evaluate.py for prompts of these lengths."""
    found: set[Graph] = set()
    for one, timed in _modes(drafts, tree, max(prompts) + conf.new_tokens, conf):
        found.update(one.graphs(prompts, fused=fused, unfused=timed or not fused, lazy=lazy))
    return found


def _modes(
    drafts: Sequence[Drafting], tree: Tree, slots: int, conf: EvaluationConf
) -> Iterator[tuple[Decoding, bool]]:
    """Every decoder, and whether its rounds are taken apart: contenders.py, then batched.py.

    The untrained draft is not there: it shares the graphs of the trained one.
    """
    chain = TreeConf(kind=TreeKind.chain, depth=tree.depth).build()
    least = min((one.layers for one in drafts if not one.target), key=len, default=())
    plain = Decoding(
        drafting=Drafting(kind=ALONE, layers=least), tree=NO_TREE, slots=slots,
        sampling=conf.sampling,
    )  # fmt: skip
    yield plain, True
    lookup = Drafting(kind=NgramDraft.method, layers=least)
    yield replace(plain, drafting=lookup, tree=chain), True
    for one in drafts:
        alone = replace(plain, drafting=replace(one, kind=ALONE, sizes=""))
        drawn = replace(plain, drafting=one, tree=tree, verifier=conf.verifier)
        if one.target:
            yield alone, True
        yield from ((drawn, True), (replace(drawn, tree=chain), True))
        for batch in conf.batches:
            yield from ((replace(mode, batch=batch), False) for mode in (alone, drawn))

"""List the graphs that an evaluation needs, from its configuration and the prompt lengths.

    prefill    one per padded prompt length
    begin      one per padded prompt length, draft and tree
    fused      a whole round; one per decoder
    score, accept, move, draft_next                        the parts of a round, which are timed
    allocate_slots, open_slots, empty_like, scatter_rows   the code between them, on lazy devices
                                                           (Device.compile_if_lazy)

Decoders whose functions take arguments of equal shapes share graphs, so the graphs of a run are a
set. The plan reads specs, not models, so it can be made before anything is loaded.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from infer.config import EvaluationConf, Verification
from infer.engine.admission import bucket_length
from infer.engine.rounds import DecodePolicy
from infer.engine.session import NO_DRAFT, count_cache_slots
from infer.verify import AcceptanceRule, build_acceptance_rule, build_evaluation_rule
from models.device.graph_budget import KIND_SEPARATOR, Graph, graph_key_of
from models.drafts.base import Draft
from models.drafts.ngram import MixedDraft, NgramDraft
from models.speculate.config import SamplingConf, TreeConf
from models.speculate.tree import NO_TREE, Tree, TreeKind
from models.target.target import Target


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """The properties of a draft that graphs depend on."""

    kind: str  # Draft.graph_kind
    layers: tuple[int, ...]  # captured layers of the target
    shape_key: str = ""  # equal for drafts of the same kind and tensor shapes
    target_key: str = ""  # fingerprint of the draft's own target; "": the original target

    @classmethod
    def from_draft(cls, draft: Draft, target: Target | None) -> "DraftSpec":
        """Describe a loaded draft; `target` is the target that its method trained, if any."""
        return cls(
            kind=draft.graph_kind, layers=tuple(draft.needs.layers), shape_key=graph_key_of(draft),
            target_key=target.fingerprint if target else "",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """The properties of a decoder that graphs depend on."""

    draft: DraftSpec
    tree: Tree
    slots: int
    sampling: SamplingConf = field(default_factory=SamplingConf)
    acceptance_rule: AcceptanceRule | None = None
    batch: int = 1

    @property
    def policy(self) -> DecodePolicy:
        rule = self.acceptance_rule or build_acceptance_rule(Verification.auto, self.sampling)
        return DecodePolicy(
            sampling_rule=self.sampling, acceptance_rule=rule, tree=self.tree,
            vocab_size=0,  # which graph keys do not contain
        )  # fmt: skip

    @property
    def kind(self) -> str:
        if self.tree.ngram_tokens and self.draft.kind != NO_DRAFT:
            return f"{MixedDraft.method}_{self.draft.kind}"
        return self.draft.kind

    def list_graphs(
        self, prompt_lengths: Iterable[int], *, fused: bool = True, unfused: bool = False,
        lazy: bool = False,
    ) -> Iterator[Graph]:  # fmt: skip
        """Yield the graphs that decoding prompts of these lengths needs.

        Rounds are `fused`, `unfused` or both. With `lazy` (`Device.lazy`) the code between the
        steps has graphs too.
        """
        draft, policy, slots = self.draft, self.policy, count_cache_slots(self.tree, self.slots)
        target_key = (draft.target_key, draft.layers, slots)
        draft_key = (draft.shape_key, draft.layers, slots, policy.graph_key)
        proposal_key = (self.tree.size, policy.acceptance_rule.needs_drawn_tokens(self.tree))
        has_draft = draft.kind != NO_DRAFT
        for padded in sorted({min(bucket_length(n), self.slots) for n in prompt_lengths}):
            yield Graph("prefill", (*target_key, policy.sampling_rule.graph_key, padded))
            if has_draft:
                yield Graph(f"begin{KIND_SEPARATOR}{self.kind}", (*draft_key, padded))
        if fused:
            yield Graph(f"fused{KIND_SEPARATOR}{self.kind}", (target_key, draft_key, self.batch))
        moves_key = (policy.lookahead, policy.max_moves, slots)
        if unfused:
            rows_key = (self.batch, *moves_key, policy.sampling_rule.has_penalties)
            yield Graph("score", (*target_key, *rows_key, *proposal_key))
            yield Graph("accept", (draft.layers, *rows_key, *proposal_key, policy.graph_key))
            if policy.max_moves:
                yield Graph("move", rows_key)
            if has_draft:
                yield Graph(f"draft_next{KIND_SEPARATOR}{self.kind}", (*draft_key, self.batch))
        if lazy:
            slots_key = (draft.target_key, self.kind, draft.shape_key, slots)
            rows_key = (*moves_key, policy.sampling_rule.graph_key)
            yield from (Graph("allocate_slots", (*slots_key, n)) for n in {1, self.batch})
            yield Graph("open_slots", rows_key)
            if self.batch > 1:
                rows_key = (*rows_key, *proposal_key, self.batch)
                yield Graph("empty_like", rows_key)
                yield Graph("scatter_rows", (*slots_key, *rows_key))


def plan_eval_graphs(
    drafts: Sequence[DraftSpec], *, tree: Tree, prompt_lengths: Sequence[int], conf: EvaluationConf,
    tuned: Sequence[tuple[DraftSpec, Tree]] = (), fused: bool = True, lazy: bool = False,
) -> set[Graph]:  # fmt: skip
    """Return the graphs that infer/measure/evaluate.py needs for prompts of these lengths.

    `tuned` are the drafts and trees of the modes `tuned`.
    """
    slots = max(prompt_lengths) + conf.new_tokens
    decoders = [*_list_decoders(drafts, tree, slots, conf)]
    decoders += [
        (
            DecoderSpec(
                draft=draft, tree=tuned_tree, slots=slots, sampling=conf.sampling,
                acceptance_rule=build_evaluation_rule(conf),
            ),
            True,
        )
        for draft, tuned_tree in tuned
    ]  # fmt: skip
    return {
        graph
        for spec, timed in decoders
        for graph in spec.list_graphs(
            prompt_lengths, fused=fused, unfused=(timed and conf.phases) or not fused, lazy=lazy
        )
    }


def _list_decoders(
    drafts: Sequence[DraftSpec], tree: Tree, slots: int, conf: EvaluationConf
) -> Iterator[tuple[DecoderSpec, bool]]:
    """Yield the decoders of infer/measure/: first those of eval_modes.py, then of batched.py.

    The flag says whether a decoder's rounds are also run unfused. The untrained draft is left out:
    it shares the graphs of the trained draft.
    """
    chain = TreeConf(kind=TreeKind.chain, depth=tree.depth).build()
    layers = min((draft.layers for draft in drafts if not draft.target_key), key=len, default=())
    autoregressive = DecoderSpec(
        draft=DraftSpec(kind=NO_DRAFT, layers=layers), tree=NO_TREE, slots=slots,
        sampling=conf.sampling,
    )  # fmt: skip
    lookup = DraftSpec(kind=NgramDraft.method, layers=layers)
    yield from ((autoregressive, True), (replace(autoregressive, draft=lookup, tree=chain), True))
    for draft in drafts:
        target_only = replace(autoregressive, draft=replace(draft, kind=NO_DRAFT, shape_key=""))
        speculative = replace(
            autoregressive, draft=draft, tree=tree, acceptance_rule=build_evaluation_rule(conf)
        )
        if draft.target_key:
            yield target_only, True
        yield from ((speculative, True), (replace(speculative, tree=chain), True))
        for batch in conf.batch_sizes:
            yield from ((replace(mode, batch=batch), False) for mode in (target_only, speculative))

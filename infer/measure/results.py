"""What was measured: every mode over the same prompts, the drafts that they belong to, on what."""

from dataclasses import dataclass, field, replace
from typing import Any

from data.eval_prompts.contamination import Contamination
from infer.measure.intervals import Estimate
from infer.measure.records import Costs, Exactness, Trace, Verdict
from infer.verify import Typical

LOSSY = (Typical.name,)


@dataclass(kw_only=True)
class Split:
    """Seconds of the parts of an unfused round, of all of it, and of a fused round."""

    draft_s: float
    verify_s: float
    accept_s: float
    cache_move_s: float
    host_s: float
    round_s: float
    fused_round_s: float | None = None  # where rounds are not fused


@dataclass(kw_only=True)
class Judged:
    """By which rule draft tokens were accepted, and how the answers compare with the target's."""

    verification: str = "exact"  # a rule without a name, which keeps the target's own answers
    exactness: Exactness = field(default_factory=Exactness)

    @property
    def lossy(self) -> bool:
        """Whether the rule of verification keeps the target's distribution only roughly."""
        return self.verification in LOSSY

    @property
    def lossless(self) -> Verdict:
        """Never yes of a lossy rule, also where it happened to say what the target says."""
        return Verdict.no if self.lossy else self.exactness.verdict


@dataclass(kw_only=True)
class Measured(Judged):
    """One mode over all prompts.

    `draft_passes` are the draft's forward passes in a row a round (L of `mbsu`), 0 of n-grams;
    `bottleneck` says in one sentence what holds the speed-up back.
    """

    traces: list[Trace]
    costs: Costs | None = None
    graphs_after_warmup: int | None = None
    batch: int = 1
    draft_passes: int | None = None
    split: Split | None = None
    bottleneck: str | None = None

    def among(self, prompt_ids: set[str]) -> "Measured":
        """The same, of these prompts alone; what was said of all is not of them."""
        return replace(
            self,
            traces=[trace for trace in self.traces if trace.prompt_id in prompt_ids],
            exactness=self.exactness.among(prompt_ids),
            bottleneck=None,
        )


@dataclass(kw_only=True)
class NotMeasured:
    """A mode that could not be run, and why: the report holds null and the reason."""

    reason: str

    def among(self, prompt_ids: set[str]) -> "NotMeasured":  # noqa: ARG002
        return self


Mode = Measured | NotMeasured


@dataclass(kw_only=True)
class Memory:
    """Bytes that a draft takes beside its target: weights, and its state of one row."""

    weights: int
    state: int


@dataclass(kw_only=True)
class AdaptedTarget:
    """A target that a draft's method changed: it verifies that draft, and is its baseline."""

    name: str
    parameters: int
    adapted_from: str
    autoregressive: Measured
    weight_bytes: int | None = None

    def among(self, prompt_ids: set[str]) -> "AdaptedTarget":
        return replace(self, autoregressive=self.autoregressive.among(prompt_ids))

    def changed_answers(self, original: Measured) -> int:
        """Prompts that it answers otherwise than the original target does."""
        answers = {trace.prompt_id: trace.ids for trace in original.traces}
        return sum(trace.ids != answers[trace.prompt_id] for trace in self.autoregressive.traces)


@dataclass(kw_only=True)
class AtBatch(Judged):
    """One mode of a draft with so many rows decoded at a time, beside decoding them alone."""

    batch: int
    mode: str
    speedup: Estimate
    tokens_per_s: Estimate
    autoregressive_tokens_per_s: Estimate
    acceptance_length: Estimate


@dataclass(kw_only=True)
class Replayed:
    """Acceptance on the target's own text: of the rounds decoding has, and from every position."""

    tau: Estimate
    all_positions: Estimate


@dataclass(kw_only=True)
class Piece:
    """Text of one origin."""

    text: str
    kind: str  # prompt, accepted (drafted) or target (its own)


@dataclass(kw_only=True)
class Sample:
    """An answer in pieces, to look at."""

    prompt_id: str
    mode: str
    pieces: list[Piece]


@dataclass(kw_only=True)
class DraftRun:
    """One draft in its modes: before distillation, and distilled as a chain and as a tree."""

    name: str
    method: str
    parameters: int
    memory: Memory
    untrained: Mode
    chain: Mode
    tree: Mode
    target: AdaptedTarget | None = None
    contamination: Contamination | None = None
    replayed: Replayed | None = None
    batches: list[AtBatch] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    longest_row: int | None = None  # tokens of the longest row that it learned from

    @property
    def modes(self) -> dict[str, Mode]:
        own = {"autoregressive": self.target.autoregressive} if self.target else {}
        return own | {"untrained": self.untrained, "chain": self.chain, "tree": self.tree}

    def among(self, prompt_ids: set[str]) -> "DraftRun":
        """The same, of these prompts alone."""
        return replace(
            self,
            untrained=self.untrained.among(prompt_ids),
            chain=self.chain.among(prompt_ids),
            tree=self.tree.among(prompt_ids),
            target=self.target and self.target.among(prompt_ids),
        )


@dataclass(kw_only=True)
class Setting:
    """What was measured, on what: everything a reader needs to measure it again.

    `device` is what `Device.describe` says: name, kind, dtype, threads, compiled; `tree` what
    `Tree.describe` does: kind, depth, nodes, copied.
    """

    command: str
    versions: dict[str, str]
    device: dict[str, Any]
    target: str
    target_parameters: int
    prompts_sha256: str
    max_new_tokens: int
    sampling: dict[str, Any]
    tree: dict[str, Any]
    target_weight_bytes: int | None = None
    prompts_source: str = "the demo's"
    prompts_rendered: int = 0  # by a chat template
    graphs: dict[str, dict[str, int]] | None = None  # by function; None: nothing is compiled

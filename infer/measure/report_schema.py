"""The content of report.json, as a tree of dataclasses; `docs/report.md` defines every field.

`python -m scripts.report_schema` derives `docs/report.schema.json` from it. A field with a default
may be absent in a file: older reports of the same version lack it. Of several base classes, the
fields of the last one come first.
"""

from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Annotated, Any, Literal

from pydantic import Field

from data.eval_prompts.contamination import Contamination
from infer.measure.intervals import Estimate
from models.speculate.config import SamplingConf

SCHEMA_VERSION: Literal[3] = 3
Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
TextKind = Literal["prompt", "accepted", "target"]
TrainedMode = Literal["chain", "tree"]
GainMetric = Literal["acceptance_length", "acceptance_rate", "speedup"]
Gain = dict[GainMetric, Estimate | None]


class LosslessVerdict(StrEnum):
    """The verdict on whether a mode's answers equal the target's own."""

    yes = auto()
    no = auto()
    undecided = auto()  # logits move by more than the precision explains


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """The device that ran the measurement, as `Device.describe` returns it."""

    name: str
    kind: str
    dtype: str
    threads: Size
    compiled: bool
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    name: str
    parameters: Count


@dataclass(frozen=True, kw_only=True)
class AdaptedTargetInfo(TargetInfo):
    """A target that a draft's method adapted; it verifies the draft and is its baseline."""

    adapted_from: str
    changed_answers: Count


@dataclass(frozen=True, kw_only=True)
class TreeInfo:
    """The tree of the modes `tree` and `untrained`."""

    kind: str
    depth: Count
    nodes: Count
    copied: Count


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The held-out prompts; `contamination` is by draft."""

    count: Size
    questions: Size
    sha256: Annotated[str, Field(min_length=64, max_length=64)]
    source: Annotated[str, Field(min_length=1)] = "an unknown source"
    chat_template: Count = 0
    lengths: dict[Literal["shortest", "median", "longest"], Count] = field(default_factory=dict)
    max_new_tokens: Size
    by_category: dict[str, Size]
    contamination: dict[str, Contamination]


@dataclass(frozen=True, kw_only=True)
class PositionAcceptance:
    """Acceptance at position 1, 2, ....

    `marginal` is the share of all rounds, `conditional` the share of the rounds that accepted the
    position before (None if there is no such round).
    """

    marginal: list[Share]
    conditional: list[Share | None]


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    p50: Amount
    p90: Amount
    p99: Amount


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A token that the target, decoding one token at a time, does not emit.

    `logit_gap` is how much higher the target rated its own choice.
    """

    prompt_id: str
    position: Count
    logit_gap: Amount


@dataclass(frozen=True, kw_only=True)
class RoundCosts:
    """Milliseconds that a round drafts and verifies, and those of an autoregressive step.

    `level` is the part of `draft` that a level of the tree takes on average.
    """

    draft: Amount
    verify: Amount
    autoregressive_step: Amount
    level: Amount | None = None  # None for n-gram lookup, which has no levels to compute

    def predicted_speedup(self, acceptance_length: float) -> float:
        """Return the speed-up of a loop that does nothing but draft and verify."""
        return acceptance_length * self.autoregressive_step / (self.draft + self.verify)


@dataclass(frozen=True, kw_only=True)
class RoundSplit:
    """Mean milliseconds of the phases of an unfused round, of all of it, and of a fused round."""

    draft: Amount
    verify: Amount
    accept: Amount
    cache_move: Amount
    host: float
    round: Amount
    fused_round: Amount | None  # None if rounds are not fused

    @property
    def plain_step(self) -> float:
        """Return the part of an autoregressive round that is the step itself."""
        return self.verify + self.accept


@dataclass(frozen=True, kw_only=True)
class ModeFigures:
    """Figures of a mode that follow from the rounds and times of its prompts.

    `draft_passes` is the number of consecutive forward passes of the draft in a round (L in
    `mbsu`), 0 for n-gram lookup.
    """

    prompts: Size
    questions: Size
    batch: Size
    depth: Count
    nodes: Count
    drafts_trees: bool
    tokens_per_s: Estimate | None
    speedup: Estimate | None
    speedup_e2e: Estimate | None
    acceptance_length: Estimate | None
    delivered_per_round: Estimate | None
    acceptance_length_per_prompt: Estimate | None
    acceptance_rate: Estimate | None
    draft_passes: Count | None
    mbsu: Estimate | None
    acceptance_by_position: PositionAcceptance
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    e2e_ms: Percentiles | None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on whether answers are the target's own, and the evidence for it."""

    verification: str
    lossy: bool  # whether the rule keeps the target's distribution only approximately
    lossless: LosslessVerdict
    mismatched_prompts: Count
    near_tie_gap: Amount
    explained_gap: Amount
    divergences_beyond_gap: Count
    divergences: list[Mismatch]


@dataclass(frozen=True, kw_only=True)
class ModeSection(Verdict, ModeFigures):
    """One mode; `bottleneck` is a sentence on what limits its speed-up."""

    efficiency: Amount | None
    predicted_speedup: Amount | None
    costs_ms: RoundCosts | None
    split_ms: RoundSplit | None = None
    bottleneck: str | None = None
    graphs_after_warmup: Count | None


@dataclass(frozen=True, kw_only=True)
class BatchFigures:
    """Figures of one mode of a draft with `batch` rows decoded together.

    The speed-up is over autoregressive decoding with as many rows.
    """

    draft: str
    batch: Size
    mode: str
    speedup: Estimate
    tokens_per_s: Estimate
    autoregressive_tokens_per_s: Estimate
    acceptance_length: Estimate


@dataclass(frozen=True, kw_only=True)
class BatchSection(Verdict, BatchFigures):
    """The figures of a batch, and the verdict on its answers."""


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """Acceptance lengths on the target's own text.

    `tau` is over the rounds of decoding, `all_positions` over rounds from every token.
    """

    tau: Estimate
    all_positions: Estimate


@dataclass(frozen=True, kw_only=True)
class TextSpan:
    """A span of text of one origin: the prompt, a draft token or a token of the target's own."""

    text: str
    kind: TextKind


@dataclass(frozen=True, kw_only=True)
class SampleAnswer:
    """An answer as spans of text."""

    draft: str
    prompt_id: str
    mode: str
    pieces: list[TextSpan]


@dataclass(frozen=True, kw_only=True)
class DraftMemory:
    """Bytes that a draft needs besides its target: its weights, and its state for one row."""

    weights: Count
    state: Count


@dataclass(frozen=True, kw_only=True)
class DraftSection:
    """A draft: its modes, and the gains of the trained ones.

    `target` is None if the report's target verifies the draft. Otherwise `modes` begins with
    the autoregressive mode of the adapted target.
    """

    name: str
    method: str
    parameters: Count
    memory_bytes: DraftMemory
    target: AdaptedTargetInfo | None
    modes: Annotated[
        dict[str, ModeSection | None],
        Field(json_schema_extra={"required": ["untrained", "chain", "tree"]}),
    ]
    tuned_tree: str | None = None  # the decoding of the mode `tuned`, in words
    not_measured: dict[str, str]
    gain: dict[TrainedMode, dict[Literal["over_untrained", "over_ngram"], Gain | None]]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Every mode on one set of prompts; `not_measured` has the reason for each missing mode."""

    loop_share: Share
    autoregressive: ModeSection
    ngram: ModeSection | None
    not_measured: dict[str, str]
    drafts: list[DraftSection]


@dataclass(frozen=True, kw_only=True)
class LengthBucket:
    """Tau, by draft and mode, of the prompts of at most `up_to` tokens."""

    up_to: Count
    prompts: Size
    drafts: dict[str, dict[TrainedMode, Estimate | None]]


@dataclass(frozen=True, kw_only=True)
class LengthSection:
    """Tau by prompt length, beside the tokens of the longest row that each draft trained on."""

    longest_row: dict[str, Count | None] = field(default_factory=dict)
    buckets: list[LengthBucket] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """Tau on the prompts that chose the checkpoint, after training on this many tokens."""

    tokens: Count
    tau: Amount


@dataclass(frozen=True, kw_only=True)
class PromptFigures:
    """The raw numbers of one prompt in one mode, from which a reader can compute metrics."""

    tokens: Count
    rounds: Count
    accepted: Count
    drafted: Count
    ttft_ms: Amount
    itl_ms: Amount | None
    e2e_ms: Amount


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One prompt and its figures by mode, such as `ngram` or `NAME/tree`."""

    prompt_id: str
    category: str
    question: str
    turn: Count
    prompt_tokens: Count = 0
    modes: dict[str, PromptFigures]


@dataclass(frozen=True, kw_only=True)
class EvalSetup:
    """The setup of an evaluation: everything that a reader needs to repeat it.

    `graphs` counts those announced and compiled by function; it is None if nothing is compiled.
    """

    schema_version: Literal[3]
    created: Annotated[str, Field(description="UTC, ISO 8601")]
    command: str
    versions: dict[str, str]
    device: DeviceInfo
    graphs: dict[str, dict[str, Count]] | None = None
    target: TargetInfo
    sampling: SamplingConf
    tree: TreeInfo
    prompts: PromptSet


@dataclass(frozen=True, kw_only=True)
class Report(Section, EvalSetup):
    """report.json of a run."""

    categories: dict[str, Section]
    batches: list[BatchSection] = field(default_factory=list)
    replay: dict[str, ReplayResult] = field(default_factory=dict)
    samples: list[SampleAnswer] = field(default_factory=list)
    by_prompt_length: LengthSection = field(default_factory=LengthSection)
    training: dict[str, list[CurvePoint]] = field(default_factory=dict)  # by draft
    per_prompt: Annotated[list[PromptRow], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class EvalReport(Report):
    """A report with all that was recorded: each item of `rounds` is a line of rounds.jsonl."""

    rounds: list[dict[str, Any]]

"""The content of report.json, as a tree of dataclasses; `docs/report.md` defines every field.

`python -m scripts.report_schema` derives `docs/report.schema.json` from it.
"""

from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Annotated, Any, Literal

from pydantic import Field

from data.eval_prompts.contamination import Contamination
from infer.results.intervals import Estimate
from models.trees.sampling_config import SamplingConf

SCHEMA_VERSION: Literal[5] = 5
Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
TextKind = Literal["prompt", "accepted", "target"]
GainMetric = Literal["acceptance_length", "acceptance_rate", "speedup"]
Gain = dict[GainMetric, Estimate | None]
# The key of a mode: `autoregressive`, `ngram` or `NAME/MODE` of the draft NAME.
ModeKey = str


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
    processes: Count = 1  # that hold its weights together


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
    source: Annotated[str, Field(min_length=1)]
    chat_template: Count
    lengths: dict[Literal["shortest", "median", "longest"], Count]
    max_new_tokens: Size
    by_category: dict[str, Size]
    contamination: dict[str, Contamination]


@dataclass(frozen=True, kw_only=True)
class EvalSetup:
    """The setup of an evaluation: everything that a reader needs to repeat it.

    `graphs` counts those announced and compiled by function; `graphs_after_warmup` those compiled
    outside of a warm-up. Both are None if nothing is compiled.
    """

    created: Annotated[str, Field(description="UTC, ISO 8601")]
    command: str
    versions: dict[str, str]
    device: DeviceInfo
    graphs: dict[str, dict[str, Count]] | None
    graphs_after_warmup: Count | None
    target: TargetInfo
    sampling: SamplingConf
    tree: TreeInfo
    prompts: PromptSet


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
    def verification(self) -> float:
        """Return the part of a round that scores the tree, accepts a path and moves the cache."""
        return self.verify + self.accept + self.cache_move

    @property
    def plain_step(self) -> float:
        """Return the part of an autoregressive round that is the step itself."""
        return self.verify + self.accept


@dataclass(frozen=True, kw_only=True)
class ModeFigures:
    """Figures of a mode that follow from the rounds and times of its prompts.

    `draft_passes` is the number of consecutive forward passes of the draft in a round, 0 for n-gram lookup.
    """

    prompts: Size
    questions: Size
    depth: Count
    nodes: Count
    tokens_per_s: Estimate | None
    speedup: Estimate | None
    speedup_e2e: Estimate | None
    acceptance_length: Estimate | None
    delivered_per_round: Estimate | None
    acceptance_rate: Estimate | None
    draft_passes: Count | None
    predicted_speedup: Amount | None
    efficiency: Amount | None
    acceptance_by_position: PositionAcceptance
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    e2e_ms: Percentiles | None


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One mode on one set of prompts; `gains` are over other modes, by their name."""

    figures: ModeFigures
    verdict: Verdict
    split_ms: RoundSplit | None
    gains: dict[Literal["untrained", "ngram"], Gain]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Every measured mode on one set of prompts."""

    loop_share: Share
    modes: dict[ModeKey, Mode]


@dataclass(frozen=True, kw_only=True)
class AdaptedTarget:
    """A target that a draft's method adapted; it verifies the draft and is its baseline."""

    name: str
    parameters: Count
    changed_answers: Count


@dataclass(frozen=True, kw_only=True)
class DraftMemory:
    """Bytes that a draft needs besides its target: its weights, and its state for one row."""

    weights: Count
    state: Count


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """Tau on the prompts that chose the checkpoint, after training on this many tokens."""

    tokens: Count
    tau: Amount


@dataclass(frozen=True, kw_only=True)
class BatchFigures:
    """Figures of a draft's tree with `size` rows decoded together.

    The speed-up is over autoregressive decoding with as many rows.
    """

    size: Size
    speedup: Estimate | None
    tokens_per_s: Estimate | None
    autoregressive_tokens_per_s: Estimate | None
    acceptance_length: Estimate | None
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class TextSpan:
    """A span of text of one origin: the prompt, a draft token or a token of the target's own."""

    text: str
    kind: TextKind


@dataclass(frozen=True, kw_only=True)
class SampleAnswer:
    """An answer of the mode `tree` as spans of text."""

    prompt_id: str
    pieces: list[TextSpan]


@dataclass(frozen=True, kw_only=True)
class DraftInfo:
    """A draft, and what was measured of it apart from its modes.

    `target` is None if the report's target verifies the draft; otherwise the draft has a mode
    `autoregressive` of its own. `not_measured` has the reason for each missing mode, `longest_row`
    the tokens of the longest row that the draft trained on, None if its run does not record it.
    """

    name: str
    method: str
    parameters: Count
    memory_bytes: DraftMemory
    target: AdaptedTarget | None
    tuned_tree: str | None  # the decoding of the mode `tuned`, in words
    not_measured: dict[str, str]
    longest_row: Count | None
    training: list[CurvePoint]
    batches: list[BatchFigures]
    samples: list[SampleAnswer]


@dataclass(frozen=True, kw_only=True)
class PromptFigures:
    """The raw numbers of one prompt in one mode, from which every metric is computed."""

    tokens: Count
    rounds: Count
    accepted: Count
    drafted: Count
    ttft_ms: Amount
    itl_ms: Amount | None
    e2e_ms: Amount

    @property
    def decoded_tokens(self) -> int:
        """Return the tokens that rounds added to the answer: all but the prefill's."""
        return self.tokens - 1

    @property
    def decode_s(self) -> float:
        """Return the seconds of all rounds, without the prefill."""
        return (self.e2e_ms - self.ttft_ms) / 1000


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One prompt and its figures in each mode."""

    prompt_id: str
    category: str
    question: str
    turn: Count
    prompt_tokens: Count
    modes: dict[ModeKey, PromptFigures]


@dataclass(frozen=True, kw_only=True)
class Report:
    """report.json of a run; `overall` is of all prompts, `categories` of those of each category."""

    schema_version: Literal[5]
    setup: EvalSetup
    drafts: list[DraftInfo]
    overall: Section
    categories: dict[str, Section]
    per_prompt: Annotated[list[PromptRow], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class EvalReport(Report):
    """A report with all that was recorded: each item of `rounds` is a line of rounds.jsonl."""

    rounds: list[dict[str, Any]]

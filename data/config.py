"""What to learn from: where documents come from, their shape, the length of a training row."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from models.device import Device
from models.errors import UserError
from models.target.target import TargetConf

DEMO = "demo"  # in place of a path: the embedded demo's own prompts


class Source(Enum):
    """Where the documents come from."""

    demo = "demo"  # prompts of the embedded demo, answered by the target
    jsonl = "jsonl"  # a file with one JSON object a line
    captured = "captured"  # a feature store, written by data.capture
    dataset = "dataset"  # a Hugging Face dataset: hub name, saved directory or data file
    prepared = "prepared"  # a folder that data.prepare wrote


class Format(Enum):
    """The shape of a row."""

    auto = "auto"  # told from the row itself
    messages = "messages"  # messages: [{role, content}]
    sharegpt = "sharegpt"  # conversations: [{from, value}]
    ultrachat = "ultrachat"  # data: [question, answer, question, ...]
    prompt = "prompt"  # instruction, question, prompt: one question, maybe with its answer
    text = "text"  # text: plain text
    tokens = "tokens"  # ids: [int], answer: [bool]


class Turns(Enum):
    """Which assistant turns of a conversation are learned."""

    auto = "auto"  # as `all` where the chat template keeps what it wrote, else as `each`
    all = "all"  # every turn, one document a conversation
    each = "each"  # every turn, one document a turn with the history that it saw
    last = "last"  # the last turn only


class Author(Enum):
    """Who continues the demo's training prompts."""

    target = "target"
    corpus = "corpus"  # ground truth: what the texts themselves say next


@dataclass(kw_only=True)
class DemoAnswersConf:
    """How the demo's training prompts are answered."""

    by: Author = Author.target
    prompts: int = 1000
    max_new_tokens: int = 128
    temperature: float = 0.7
    batch: int = 32

    def __post_init__(self) -> None:
        rules = [
            (self.prompts >= 1, f"data.answers.prompts: must be at least 1, got {self.prompts}"),
            (
                self.max_new_tokens >= 2,
                f"data.answers.max_new_tokens: must be at least 2, got {self.max_new_tokens}",
            ),
            (
                self.temperature >= 0,
                f"data.answers.temperature: must be 0 (greedy) or more, got {self.temperature}",
            ),
            (self.batch >= 1, f"data.answers.batch: must be at least 1, got {self.batch}"),
        ]
        _refuse([message for holds, message in rules if not holds])


@dataclass(kw_only=True)
class OnPolicyConf:
    """How much of the training text the draft writes itself (DistillSpec, arXiv 2310.08461)."""

    share: float = 0.0  # of the visited rows
    every: int = 50  # steps between renewals; states are saved at multiples of it
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UserError(f"data.on_policy.share: must lie in 0..1, got {self.share}; 0 has none")
        if self.every < 1:
            raise UserError(f"data.on_policy.every: must be at least 1, got {self.every}")
        if self.temperature < 0:
            raise UserError(
                f"data.on_policy.temperature: must be 0 (greedy) or more, got {self.temperature}"
            )


@dataclass(kw_only=True)
class DataConf:
    """Configures reading, tokenising and packing."""

    source: Source = Source.demo
    for_any_target: bool = False  # source=demo: also for another target than the demo's own
    path: str | None = None  # JSONL file, hub name, saved dataset, data file or prepared folder
    subset: str | None = None  # the dataset's configuration
    split: str = "train"  # of a dataset, slices work too: train[1000:]
    format: Format = Format.auto
    column: str | None = None  # None = messages, conversations, text or ids
    turns: Turns = Turns.auto
    template: dict[str, Any] = field(default_factory=dict)  # arguments of the chat template
    length: int = 512  # tokens of a packed row
    overlap: int | None = None  # tokens that parts of a long document share; None = cut its end
    limit: int | None = None  # rows to read; None = all
    seed: int = 0  # of the order
    keep_features: bool = False  # of all rows, in memory: later epochs need no target pass
    answers: DemoAnswersConf = field(default_factory=DemoAnswersConf)  # source=demo only
    on_policy: OnPolicyConf = field(default_factory=OnPolicyConf)
    checksums: bool = True  # of a feature store's files are compared; false: sizes alone

    def __post_init__(self) -> None:
        rules = [
            (
                self.source is not Source.demo or self.path is None,
                f"data.path: must be null for data.source=demo, got {self.path!r}; add data=jsonl",
            ),
            (
                self.length >= 16,
                f"data.length: must be at least 16, got {self.length}; "
                "a row must hold a prompt and its answer",
            ),
            (
                self.overlap is None or 1 <= self.overlap <= self.length // 2,
                f"data.overlap: must be 1 to half of data.length={self.length}, got "
                f"{self.overlap}; null cuts long documents at the end",
            ),
            (
                self.limit is None or self.limit >= 1,
                f"data.limit: must be at least 1 or null for all rows, got {self.limit}",
            ),
        ]
        _refuse([message for holds, message in rules if not holds])

    def check_path(self) -> None:
        """Refuse a source without its path. Plans read no data and do without."""
        if self.source is not Source.demo and self.path is None:
            raise UserError(
                f"data.path: must be set for data.source={self.source.value}, got null; "
                "give a local path by data.path=FILE or, for dataset, a hub name"
            )

    def check_target(self, target: TargetConf) -> None:
        """Refuse the demo's prompts for another target, unless they are asked for by name."""
        if self.source is Source.demo and not self.for_any_target and not target.is_demo:
            raise UserError(
                "data.source: the demo's prompts must be for the demo's own target, got target "
                f"{target.path or target.name}; give data=jsonl data.path=FILE or a draft that "
                "brings its data, or type data=demo to take them all the same"
            )

    def check_device(self, device: Device) -> None:
        """Refuse rows that this device cannot read, before a model is loaded."""
        multiple = device.length_multiple
        if self.length % multiple:
            raise UserError(
                f"data.length: must be a multiple of {multiple} on {device.instance}, "
                f"got {self.length}; take {-(-self.length // multiple) * multiple}"
            )


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UserError("; ".join(problems))

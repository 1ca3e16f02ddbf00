"""Configure training data: its source, the format of its rows, the length of packed rows."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from models.device import Device
from models.errors import UserError
from models.target.target import TargetConf

DEMO = "demo"  # stands in for a path and names the embedded demo's prompts


class DataSource(Enum):
    """The source of the training documents."""

    demo = "demo"  # prompts of the embedded demo, answered by the target
    jsonl = "jsonl"  # a file with one JSON object a line
    captured = "captured"  # a feature store, written by data.capture
    dataset = "dataset"  # a Hugging Face dataset: hub name, saved directory or data file
    prepared = "prepared"  # a folder that data.prepare wrote


class RowFormat(Enum):
    """The format of a row."""

    auto = "auto"  # detected from each row
    messages = "messages"  # messages: [{role, content}]
    sharegpt = "sharegpt"  # conversations: [{from, value}]
    ultrachat = "ultrachat"  # data: [question, answer, question, ...]
    prompt = "prompt"  # instruction, question, prompt: one question, with or without an answer
    text = "text"  # text: plain text
    tokens = "tokens"  # ids: [int], answer: [bool]


class TurnSelection(Enum):
    """The assistant turns of a conversation that a draft trains on."""

    auto = "auto"  # `all` where the chat template leaves earlier turns unchanged, else `each`
    all = "all"  # every turn, one document per conversation
    each = "each"  # every turn, one document per turn with the history as the target read it
    last = "last"  # the last turn only


class DemoAnswerSource(Enum):
    """The source of the answers to the demo's training prompts."""

    target = "target"
    corpus = "corpus"  # ground truth: the text that follows each prompt in its file


@dataclass(kw_only=True)
class DemoAnswersConf:
    """Settings of the answers to the demo's training prompts."""

    by: DemoAnswerSource = DemoAnswerSource.target
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
        _raise_problems([message for holds, message in rules if not holds])


@dataclass(kw_only=True)
class OnPolicyConf:
    """The share of training text that the draft generates (DistillSpec, arXiv 2310.08461)."""

    share: float = 0.0  # of the rows that training visits
    every: int = 50  # steps between renewals; training states are saved at multiples of it
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UserError(
                f"data.on_policy.share: must lie in 0..1, got {self.share}; 0 turns it off"
            )
        if self.every < 1:
            raise UserError(f"data.on_policy.every: must be at least 1, got {self.every}")
        if self.temperature < 0:
            raise UserError(
                f"data.on_policy.temperature: must be 0 (greedy) or more, got {self.temperature}"
            )


@dataclass(kw_only=True)
class DataConf:
    """Settings for reading, tokenizing and packing the training data."""

    source: DataSource = DataSource.demo
    for_any_target: bool = False  # source=demo: accept targets other than the demo's own
    path: str | None = None  # JSONL file, hub name, saved dataset, data file or prepared folder
    subset: str | None = None  # the dataset's configuration
    split: str = "train"  # of a dataset; slices such as train[1000:] work too
    format: RowFormat = RowFormat.auto
    column: str | None = None  # None = messages, conversations, text or ids
    turns: TurnSelection = TurnSelection.auto
    template: dict[str, Any] = field(default_factory=dict)  # arguments of the chat template
    length: int = 512  # tokens of a packed row
    overlap: int | None = None  # tokens shared by pieces of a long document; None = truncate it
    limit: int | None = None  # rows to read; None = all
    seed: int = 0  # of the order in which rows are visited
    keep_features: bool = False  # keep all rows' features in memory: later epochs skip the target
    answers: DemoAnswersConf = field(default_factory=DemoAnswersConf)  # source=demo only
    on_policy: OnPolicyConf = field(default_factory=OnPolicyConf)
    checksums: bool = True  # verify checksums of a feature store's files; false = sizes only

    def __post_init__(self) -> None:
        rules = [
            (
                self.source is not DataSource.demo or self.path is None,
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
        _raise_problems([message for holds, message in rules if not holds])

    def check_path(self) -> None:
        """Check that the source has its path; raise UserError otherwise.

        This is no rule of `__post_init__`, because plans read no data and need no path.
        """
        if self.source is not DataSource.demo and self.path is None:
            raise UserError(
                f"data.path: must be set for data.source={self.source.value}, got null; "
                "give a local path by data.path=FILE or, for dataset, a hub name"
            )

    def check_target(self, target: TargetConf) -> None:
        """Check that the demo's prompts are meant for this target; raise UserError otherwise."""
        if self.source is DataSource.demo and not self.for_any_target and not target.is_demo:
            raise UserError(
                "data.source: the demo's prompts must be for the demo's own target, got target "
                f"{target.path or target.name}; give data=jsonl data.path=FILE or a draft that "
                "brings its data, or type data=demo to use them anyway"
            )

    def check_device(self, device: Device) -> None:
        """Check that the device can process rows of this length; raise UserError otherwise."""
        multiple = device.length_multiple
        if self.length % multiple:
            raise UserError(
                f"data.length: must be a multiple of {multiple} on {device.instance_type}, "
                f"got {self.length}; take {-(-self.length // multiple) * multiple}"
            )


def _raise_problems(problems: list[str]) -> None:
    if problems:
        raise UserError("; ".join(problems))

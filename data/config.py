"""Configuration of training data, of `data.show` and of `data.capture`."""

import operator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

from models.device.config import DeviceConf
from models.drafts.options import DraftConf
from models.io.errors import POSITIVE, SEED, SHARE, Rule, at_least, check_values, require, unused
from models.parallel.config import TensorConf
from models.targets.config import TargetConf
from models.trees.sampling_config import SAMPLING_RULES

MISSING: Any = "???"  # OmegaConf's marker for a required value

CONTENT_COLUMNS = """
    messages conversations data ids text prompt instruction input question problem turns
    answer output response completion solution
""".split()  # noqa: SIM905 - a list would take a line for each name
DEMO = "demo"  # stands in for a path and names the embedded demo's prompts


class DataSource(Enum):
    """The source of the training documents."""

    demo = "demo"  # prompts of the embedded demo, answered by the target
    jsonl = "jsonl"  # a file with one JSON object per line
    captured = "captured"  # a feature store, written by data.capture
    dataset = "dataset"  # a Hugging Face dataset: hub name, saved directory or data file
    prepared = "prepared"  # a folder that data.prepare wrote

    @property
    def unread_keys(self) -> tuple[str, ...]:
        """Return the keys of `data` that concern other sources alone."""
        of_rows = ("subset", "format", "column", "turns", "template", "processes")
        return {
            DataSource.demo: (*of_rows, "limit"),
            DataSource.captured: of_rows,
            DataSource.prepared: of_rows[:3],
            DataSource.jsonl: of_rows[:1],
            DataSource.dataset: (),
        }[self]


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

    auto = "auto"  # `all` if the chat template leaves earlier turns unchanged, else `each`
    all = "all"  # every turn, one document per conversation
    each = "each"  # every turn, one document per turn with the history as the target read it
    last = "last"  # the last turn only


class DemoAnswerSource(Enum):
    """The source of the answers to the demo's training prompts."""

    target = "target"
    corpus = "corpus"  # ground truth: the text that follows each prompt in its file


@dataclass(kw_only=True)
class DemoConf:
    """Settings of the demo's training prompts and of their answers."""

    num_prompts: int = 1536
    for_any_target: bool = False  # accept targets other than the demo's own
    source: DemoAnswerSource = DemoAnswerSource.target  # of the answers
    max_new_tokens: int = 64  # as in the evaluation
    temperature: float = 0.0  # as in the evaluation
    batch: int = 128

    def __post_init__(self) -> None:
        check_values(
            self,
            "data.demo",
            num_prompts=at_least(1),
            max_new_tokens=at_least(2),
            batch=at_least(1),
            temperature=SAMPLING_RULES["temperature"],
        )


@dataclass(kw_only=True)
class OnPolicyConf:
    """The share of training text that the draft generates (DistillSpec, arXiv 2310.08461)."""

    share: float = 0.0  # of the rows that training visits
    interval: int = 50  # steps between renewals; training states are saved at multiples of it
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_values(
            self,
            "data.on_policy",
            share=replace(SHARE, remedy="0 turns it off"),
            interval=at_least(1),
            temperature=SAMPLING_RULES["temperature"],
        )


@dataclass(kw_only=True)
class DataConf:
    """Settings for reading, tokenizing and packing the training data."""

    source: DataSource = DataSource.demo
    path: str | None = None  # JSONL file, hub name, saved dataset, data file or prepared folder
    subset: str | None = None  # the dataset's configuration
    split: str = "train"  # a name, slices such as train[1000:], or a sum of them
    format: RowFormat = RowFormat.auto
    column: str | None = None  # None = messages, conversations, text or ids
    license: str = ""  # of the rows, for the model card; "" = what data.prepare recorded
    turns: TurnSelection = TurnSelection.auto
    template: dict[str, Any] = field(default_factory=dict)  # arguments of the chat template
    row_length: int = 2048  # tokens of a packed row
    overlap: int | None = None  # tokens shared by pieces of a long document; None = truncate it
    limit: int | None = None  # rows to read; None = all
    processes: int | None = None  # that tokenize; None = one for each CPU
    seed: int = 0  # of the order in which rows are visited
    keep_features: bool = False  # compute all rows' features before the first step, and keep them in memory
    checksums: bool = True  # verify checksums of a feature store's files; false = sizes only
    demo: DemoConf = field(default_factory=DemoConf)  # of source=demo
    on_policy: OnPolicyConf = field(default_factory=OnPolicyConf)

    def __post_init__(self) -> None:
        first_rows = f"data.{'demo.num_prompts' if self.source is DataSource.demo else 'limit'} takes the first ones"
        unread = {
            name: Rule(
                f"must keep its default for data.source={self.source.value}, which does not read it",
                partial(operator.eq, default),
                first_rows if name == "limit" else "leave it out",
            )
            for name, default in list_unread_defaults(self.source).items()
        }
        check_values(
            self,
            "data",
            path=Rule(
                "must be null for data.source=demo", lambda _: self.source is not DataSource.demo, "add data=jsonl"
            ),
            split=Rule(
                f"must be a name for data.source={self.source.value}, which is not sliced",
                lambda split: "[" not in split or self.source not in (DataSource.demo, DataSource.captured),
                first_rows,
            ),
            row_length=at_least(16, "a row must hold a prompt and its answer"),
            overlap=Rule(
                f"must be 1 to half of data.row_length={self.row_length}",
                lambda overlap: 1 <= overlap <= self.row_length // 2,
                "null cuts long documents at the end",
            ),
            limit=at_least(1, "null reads all rows"),
            processes=at_least(1, "null takes one for each CPU"),
            seed=SEED,
        )
        check_values(self, "data", **unread)

    def check_target(self, target: TargetConf) -> None:
        """Check that the demo's prompts are meant for this target; raise UserError otherwise."""
        require(
            self.source is not DataSource.demo or self.demo.for_any_target or target.is_demo,
            "data.source: the demo's prompts must be for the demo's own target, got target "
            f"{target.path or target.name}; give data=jsonl data.path=FILE, or set data.demo.for_any_target=true",
        )

    def check_row_length(self, multiple: int, *, on: str | None) -> None:
        """Raise UserError unless rows are a multiple that the machine `on` can process."""
        require(
            self.row_length % multiple == 0,
            f"data.row_length: must be a multiple of {multiple} on {on}, "
            f"got {self.row_length}; take {-(-self.row_length // multiple) * multiple}",
        )


def list_unread_defaults(source: DataSource) -> dict[str, Any]:
    """Return the defaults of the keys of `data` that concern other sources alone."""
    # A default of {} is no attribute of the class.
    return {name: getattr(DataConf, name, {}) for name in source.unread_keys}


@dataclass(kw_only=True)
class ShowConf:
    """Settings of `data.show`."""

    data: DataConf = field(  # the demo's own text, for which nothing is generated
        default_factory=lambda: DataConf(demo=DemoConf(source=DemoAnswerSource.corpus, num_prompts=64))
    )
    target: TargetConf = field(default_factory=TargetConf)  # only its tokenizer is loaded
    documents: int = 6  # documents to show, from all categories in turn
    read: int | None = 1000  # documents to read and sample from; null = all
    tokens: int = 300  # of a document in the terminal; longer runs lose their middle
    seed: int = 0  # of the sample
    run_name: str = MISSING
    output_dir: str = "outputs/show"

    def __post_init__(self) -> None:
        check_values(self, documents=at_least(1), read=at_least(1), tokens=at_least(1), seed=SEED)
        require(
            self.data.source is not DataSource.captured,
            "data.source: data.show reads rows, got captured; show what the store was captured from",
        )
        require(
            self.data.source is not DataSource.demo or self.data.demo.source is not DemoAnswerSource.target,
            "data.demo.source: data.show generates nothing, got target; take corpus, or show "
            "what `python -m data.prepare` wrote: data=prepared data.path=outputs/prepare/demo",
        )


class Dtype(Enum):
    """The storage type of hidden states."""

    bf16 = "bf16"
    int8 = "int8"
    fp8 = "fp8"

    @property
    def max_value(self) -> float | None:
        """Return the value that a row's largest is scaled to; None if rows have no scale."""
        return {"bf16": None, "int8": 127.0, "fp8": 448.0}[self.value]


class TeacherKind(Enum):
    """The form in which the target's distribution is stored."""

    hidden = "hidden"  # the final hidden state, for the target's head: exact but for rounding
    topk = "topk"  # the k likeliest tokens and the mass of the rest


@dataclass(kw_only=True)
class CaptureConf:
    """Settings of a capture, which stores the features that `draft` needs of `target` on `data`."""

    target: TargetConf = field(default_factory=TargetConf)
    draft: DraftConf = MISSING  # determines which features are stored; it is not trained
    data: DataConf = field(default_factory=DataConf)
    parallel: TensorConf = field(default_factory=TensorConf)
    device: DeviceConf = field(default_factory=DeviceConf, metadata=unused("memory_gib"))
    dtype: Dtype = Dtype.int8  # of hidden states
    teacher: TeacherKind = TeacherKind.hidden
    top_k: int = 64  # tokens of teacher=topk
    on_prompts: bool = False  # the teacher covers the tokens of prompts too, which loss.on_prompts=true learns
    batch: int = 8  # rows of data.row_length tokens in each pass of the target
    shard_mb: float = 512.0  # megabytes of a shard; writing one takes three times that in memory
    checksums: bool = True  # verify checksums of existing files; false compares only their sizes
    run_name: str = MISSING
    output_dir: str = "outputs/capture"

    def __post_init__(self) -> None:
        check_values(self, top_k=at_least(1), batch=at_least(1), shard_mb=POSITIVE)

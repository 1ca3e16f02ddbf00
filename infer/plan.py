"""`python -m infer.plan`: estimate a draft's gain on a machine without loading any weights.

python -m infer.plan draft=qwen3-32b-eagle3 machine=trn2.48xlarge tree=chain tree.depth=3
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from conf.entry import entry_point
from infer.report.number_format import Table, to_rich_table
from infer.tuning.roofline import (
    DRAFT,
    ONE_TOKEN,
    PROMPT,
    PROPOSE,
    VERIFY,
    DecodeSizes,
    estimate_seconds,
    trace_passes,
)
from models.device import DeviceConf
from models.device.machine_specs import MachineConf
from models.distill.losses import LossConf
from models.drafts.base import DraftConf
from models.errors import UserError
from models.files import open_output_file
from models.meta_model import build_meta_draft, build_meta_target, shard_target
from models.parallel.tensor_parallel import plan_shards as cuts
from models.speculate.sampling import SamplingConf
from models.speculate.tree import TreeConf
from models.target.target import TargetConf

MISSING: Any = "???"  # OmegaConf's mark of a required value
CONSOLE = Console(soft_wrap=True, highlight=False)
GIB, MS = 2**30, 1000


@dataclass(kw_only=True)
class DecodePlanConf:
    """The configuration of `python -m infer.plan`: models, decoding and machine."""

    target: TargetConf = field(default_factory=TargetConf)
    draft: DraftConf = MISSING
    tree: TreeConf = field(default_factory=TreeConf)
    loss: LossConf = field(default_factory=LossConf)  # set by the draft's configuration
    optim: Any = None  # set by the draft's configuration, like `data`; both are unused
    data: Any = None
    sampling: SamplingConf = field(default_factory=SamplingConf)
    device: DeviceConf = field(default_factory=DeviceConf)
    machine: MachineConf = field(default_factory=MachineConf)
    batch: int = 1
    prompt_tokens: int = 1024
    context: int = 2048  # tokens of prompt and answer
    share_draft: bool = True  # over the cores of a target, as serving engines do
    headroom: float = 0.1  # share of a core's memory kept for compiler, runtime, collectives
    output: str | None = None  # a file for the plan as JSON
    output_dir: str = "outputs/infer.plan"
    run_name: str = "plan"

    def __post_init__(self) -> None:
        for name in ("batch", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.context <= self.prompt_tokens:
            raise UserError(
                f"context: must be more than the {self.prompt_tokens} tokens of the prompt, "
                f"got {self.context}; raise it or lower prompt_tokens"
            )


@dataclass(frozen=True, kw_only=True)
class DecodeOption:
    """The best-case memory and times of decoding with a target split over `tensor` cores."""

    tensor: int
    bytes: int  # peak memory of a core
    parts: dict[str, int]  # bytes of the peak, by kind
    fits: bool
    prompt_s: float
    alone_s: float  # of a token without a draft
    verify_s: float
    propose_s: float
    most: int  # tokens of a round that accepts its longest path

    @property
    def break_even_length(self) -> float:
        """Return the acceptance length above which the draft makes decoding faster."""
        return (self.verify_s + self.propose_s) / self.alone_s


def list_options(conf: DecodePlanConf) -> list[DecodeOption]:
    """Estimate one option for each power of two of cores that can hold the target."""
    machine, dtype = conf.machine.resolve(conf.device), conf.machine.target_dtype(conf.device)
    machine.check_dtype(dtype)
    meta_target, options, tensor = build_meta_target(conf.target, dtype), [], 1
    while tensor <= machine.total_cores:
        try:
            cuts(meta_target.model, tensor)
        except UserError:
            break
        if meta_target.num_parameters * dtype.itemsize / tensor < machine.core_bytes:
            options.append(_estimate_option(conf, machine, dtype, tensor))
        tensor *= 2
    if not options:
        raise UserError(
            f"machine: must hold the target, got {machine.name} for {meta_target.num_parameters:,} "
            "parameters; choose a larger one"
        )
    return options


def _estimate_option(
    conf: DecodePlanConf, machine: MachineConf, dtype: Any, tensor: int
) -> DecodeOption:
    target, tree = build_meta_target(conf.target, dtype), conf.tree.build()
    draft = build_meta_draft(conf.draft, target, loss=conf.loss, seed=0).to(dtype).eval()
    shard_target(target, tensor)
    sizes = DecodeSizes(batch=conf.batch, prompt=conf.prompt_tokens, context=conf.context)
    phases = trace_passes(target, draft, tree, conf.sampling, sizes)
    peak = max(phases.values(), key=lambda phase: phase.peak_bytes.total()).peak_bytes
    seconds = {name: estimate_seconds(phase, machine) for name, phase in phases.items()}
    if conf.share_draft:
        seconds[PROPOSE] /= tensor
        peak[DRAFT] //= tensor
    return DecodeOption(
        tensor=tensor, bytes=peak.total(), parts=dict(peak), most=tree.max_path_length + 1,
        fits=peak.total() <= (1 - conf.headroom) * machine.core_bytes, prompt_s=seconds[PROMPT],
        alone_s=seconds[ONE_TOKEN], verify_s=seconds[VERIFY], propose_s=seconds[PROPOSE],
    )  # fmt: skip


def build_plan_table(options: list[DecodeOption]) -> Table:
    rows = [
        [
            str(option.tensor),
            f"{option.bytes / GIB:.2f}",
            "yes" if option.fits else "no",
            *(f"{MS * s:.2f}" for s in (option.prompt_s, option.alone_s)),
            f"{MS * option.verify_s:.2f} + {MS * option.propose_s:.2f}",
            f"{option.break_even_length:.2f}",
            f"{option.most / option.break_even_length:.2f}",
        ]
        for option in options
    ]
    return Table(
        title="Cores a target: at best, in ms",
        note="",
        columns=[
            "tensor", "GiB a core", "fits", "prompt", "token alone", "verify + propose",
            "acceptance length needed", "speed-up if all is accepted",
        ],
        rows=rows,
        stacked_headers=True,
    )  # fmt: skip


def summarize_options(conf: DecodePlanConf, options: list[DecodeOption]) -> str:
    """Describe the fitting option of least latency, or what to change so that one fits."""
    fitting = [option for option in options if option.fits]
    if fitting:
        best = min(fitting, key=lambda option: option.alone_s)
        return (
            f"On {best.tensor} cores: {MS * best.alone_s:.2f} ms a token at best without a draft; "
            f"this draft wins above {best.break_even_length:.2f} tokens a round, of {best.most} at "
            "most"
        )
    smallest = min(options, key=lambda option: option.bytes)
    if smallest.parts.get("cache", 0) > smallest.bytes / 2 and conf.batch > 1:
        return f"It does not fit. First change: batch={conf.batch // 2}"
    return "It does not fit: choose a larger machine, or a shorter context"


@entry_point("infer_plan", DecodePlanConf)
def main(conf: DecodePlanConf) -> None:
    conf.tree.read()
    options = list_options(conf)
    table = build_plan_table(options)
    machine = conf.machine.name
    CONSOLE.print(f"\n{conf.target.path or conf.target.name} with {conf.draft.method} on {machine}")
    CONSOLE.print(to_rich_table(table, ruled=True))
    CONSOLE.print(summarize_options(conf, options))
    if conf.output is not None:
        with open_output_file(conf.output) as file:
            file.write_text(json.dumps([asdict(option) for option in options], indent=2) + "\n")


if __name__ == "__main__":
    main()

"""`python -m infer.plan`: what a draft could gain on a machine, before anything is loaded.

python -m infer.plan draft=qwen3-32b-eagle3 machine=trn2.48xlarge tree=chain tree.depth=3
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from conf.entry import entry_point
from infer.report.number_format import Table, rich_table
from infer.tuning.roofline import ALONE, DRAFT, PROMPT, PROPOSE, VERIFY, Sizes, passes, seconds
from models.checkpoint import output_file
from models.device import DeviceConf
from models.device.machine_specs import MachineConf
from models.distill.losses import LossConf
from models.drafts.base import DraftConf
from models.errors import UserError
from models.meta_model import outline, outlined, share
from models.parallel.tensor_parallel import plan as cuts
from models.speculate.sampling import SamplingConf
from models.speculate.tree import TreeConf
from models.target.target import TargetConf

MISSING: Any = "???"  # OmegaConf's mark of a required value
CONSOLE = Console(soft_wrap=True, highlight=False)
GIB, MS = 2**30, 1000


@dataclass(kw_only=True)
class PlanConf:
    """What decodes, how, and where."""

    target: TargetConf = field(default_factory=TargetConf)
    draft: DraftConf = MISSING
    tree: TreeConf = field(default_factory=TreeConf)
    loss: LossConf = field(default_factory=LossConf)  # drafts bring theirs
    optim: Any = None  # likewise, as the next; nothing is trained
    data: Any = None
    sampling: SamplingConf = field(default_factory=SamplingConf)
    device: DeviceConf = field(default_factory=DeviceConf)
    machine: MachineConf = field(default_factory=MachineConf)
    batch: int = 1
    prompt_tokens: int = 1024
    context: int = 2048  # tokens of prompt and answer
    share_draft: bool = True  # among the cores of a target, as serving engines do
    headroom: float = 0.1  # share of a core's memory that is left to compiler, runtime, collectives
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
class Option:
    """What decoding comes to, at best, with a target that `tensor` cores hold together."""

    tensor: int
    bytes: int  # of a core, at its fullest moment
    parts: dict[str, int]  # of it
    fits: bool
    prompt_s: float
    alone_s: float  # a token without a draft
    verify_s: float
    propose_s: float
    most: int  # tokens of a round that accepts everything

    @property
    def needed(self) -> float:
        """Acceptance length at which a round takes as long as the tokens that it emits."""
        return (self.verify_s + self.propose_s) / self.alone_s


def options(conf: PlanConf) -> list[Option]:
    """One for each power of two of cores that can hold the target together."""
    machine, dtype = conf.machine.known(conf.device), conf.machine.dtype(conf.device)
    machine.check(dtype)
    whole, found, tensor = outline(conf.target, dtype), [], 1
    while tensor <= machine.all_cores:
        try:
            cuts(whole.model, tensor)
        except UserError:
            break
        if whole.parameters * dtype.itemsize / tensor < machine.core_bytes:
            found.append(_option(conf, machine, dtype, tensor))
        tensor *= 2
    if not found:
        raise UserError(
            f"machine: must hold the target, got {machine.name} for {whole.parameters:,} "
            "parameters; choose a larger one"
        )
    return found


def _option(conf: PlanConf, machine: MachineConf, dtype: Any, tensor: int) -> Option:
    target, tree = outline(conf.target, dtype), conf.tree.build()
    draft = outlined(conf.draft, target, loss=conf.loss, seed=0).to(dtype).eval()
    share(target, tensor)
    sizes = Sizes(batch=conf.batch, prompt=conf.prompt_tokens, context=conf.context)
    found = passes(target, draft, tree, conf.sampling, sizes)
    fullest = max(found.values(), key=lambda phase: phase.total).held
    took = {name: seconds(phase, machine) for name, phase in found.items()}
    if conf.share_draft:
        took[PROPOSE] /= tensor
        fullest[DRAFT] //= tensor
    return Option(
        tensor=tensor, bytes=fullest.total(), parts=dict(fullest), most=tree.deepest + 1,
        fits=fullest.total() <= (1 - conf.headroom) * machine.core_bytes, prompt_s=took[PROMPT],
        alone_s=took[ALONE], verify_s=took[VERIFY], propose_s=took[PROPOSE],
    )  # fmt: skip


def table(found: list[Option]) -> Table:
    rows = [
        [
            str(option.tensor), f"{option.bytes / GIB:.2f}", "yes" if option.fits else "no",
            *(f"{MS * s:.2f}" for s in (option.prompt_s, option.alone_s)),
            f"{MS * option.verify_s:.2f} + {MS * option.propose_s:.2f}", f"{option.needed:.2f}",
            f"{option.most / option.needed:.2f}",
        ]
        for option in found
    ]  # fmt: skip
    return Table(
        title="Cores a target: at best, in ms",
        note="",
        columns=[
            "tensor", "GiB a core", "fits", "prompt", "token alone", "verify + propose",
            "acceptance length needed", "speed-up if all is accepted",
        ],
        rows=rows,
        stacked=True,
    )  # fmt: skip


def verdict(conf: PlanConf, found: list[Option]) -> str:
    """The layout of the least latency that fits, or what to change first."""
    fitting = [option for option in found if option.fits]
    if fitting:
        best = min(fitting, key=lambda option: option.alone_s)
        return (
            f"On {best.tensor} cores: {MS * best.alone_s:.2f} ms a token at best without a draft; "
            f"this one wins above {best.needed:.2f} tokens a round, of {best.most} at most"
        )
    smallest = min(found, key=lambda option: option.bytes)
    if smallest.parts.get("cache", 0) > smallest.bytes / 2 and conf.batch > 1:
        return f"It does not fit. First change: batch={conf.batch // 2}"
    return "It does not fit: choose a larger machine, or a shorter context"


@entry_point("infer_plan", PlanConf)
def main(conf: PlanConf) -> None:
    conf.tree.read()
    found = options(conf)
    shown = table(found)
    where = conf.machine.name
    CONSOLE.print(f"\n{conf.target.path or conf.target.name} with {conf.draft.method} on {where}")
    CONSOLE.print(rich_table(shown, ruled=True))
    CONSOLE.print(verdict(conf, found))
    if conf.output is not None:
        with output_file(conf.output) as file:
            file.write_text(json.dumps([asdict(option) for option in found], indent=2) + "\n")


if __name__ == "__main__":
    main()

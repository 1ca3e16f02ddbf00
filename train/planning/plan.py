"""What a run could do on a machine, layout by layout."""

from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from data.features import compatibility
from data.features.manifest import Manifest
from models.device.machine_specs import HERE, MachineConf
from models.device.memory_trace import Phase
from models.drafts.base import Draft
from models.errors import UserError
from models.meta_model import Outline, head_names, outline, outlined, share
from train.config import TrainConf
from train.distributed.parallel import ParallelConf, Weights
from train.planning.graph_plan import graphs
from train.planning.layout import Layout, Speed, fullest, held, layouts, speed
from train.planning.trace import TARGET, Trace, lasting, trace
from train.run_dir import learning, room


@dataclass(kw_only=True)
class Options(TrainConf):
    """A run's configuration, and the machine that it is to run on."""

    machine: MachineConf = field(default_factory=MachineConf)
    headroom: float = 0.1  # share of a core's memory that is left to compiler, runtime, collectives
    prompt_tokens: int | None = None  # of the longest held-out prompt; null = a whole row
    tokens: float | None = None  # of the data set; null = what the steps of the run read

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.headroom < 1:
            raise UserError(f"headroom: is a share and must lie in 0..1, got {self.headroom}")
        for name in ("prompt_tokens", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}: must be at least 1, got {value}")

    @property
    def longest_prompt(self) -> int:
        return min(self.prompt_tokens or self.data.length, self.data.length)


@dataclass(kw_only=True)
class Option:
    """A layout, and what comes of it, where it was followed."""

    layout: Layout
    lasting: Phase  # what its processes hold in every step
    trace: Trace | None = None
    speed: Speed | None = None

    @property
    def least(self) -> int:
        """Bytes of a core that every step takes."""
        return held(self.lasting, self.layout).total()

    @property
    def total(self) -> int:
        """Bytes of a core at its fullest moment, as far as is known."""
        return fullest(self.trace, self.layout)[1].total() if self.trace else self.least


@dataclass(kw_only=True)
class Sizes:
    """What does not depend on the layout."""

    target: int  # parameters, as the next two
    draft: int
    trained: int
    layers: list[int]  # of the target that the method captures
    feature_bytes: int  # of a token: what the method needs of the target, or a store has of it
    disk: int  # bytes of states and checkpoints


@dataclass(kw_only=True)
class Plan:
    """What a run needs of a machine."""

    conf: Options
    machine: MachineConf
    dtype: torch.dtype
    sizes: Sizes
    options: list[Option]

    @property
    def limit(self) -> float:
        """Bytes of a core that a run may take."""
        return (1 - self.conf.headroom) * self.machine.core_bytes

    def fits(self, option: Option) -> bool:
        return option.trace is not None and option.total <= self.limit

    @property
    def best(self) -> Option:
        """The fastest that fits, of equals the one with fewest cores a target; or the smallest."""
        fitting = [option for option in self.options if self.fits(option)]
        if fitting:
            return min(fitting, key=lambda o: (o.speed.bound if o.speed else 0, o.layout.tensor))
        return min(self.options, key=lambda option: (option.trace is None, option.total))


def planned(conf: Options) -> Plan:
    """All layouts of a run; raises UserError for what no layout can do."""
    conf.check_settings()
    dtype = conf.machine.dtype(conf.device)
    machine = conf.machine.known(conf.device)
    machine.check(dtype)
    machine.check_length(conf.data.length)
    return _options(conf, machine, dtype)


def _options(conf: Options, machine: MachineConf, dtype: torch.dtype) -> Plan:
    target, draft = _models(conf, dtype)
    store = compatibility.described(conf.data, target, draft)
    if store is not None and conf.tokens is None:
        conf = replace(conf, tokens=float(store.made.tokens))
    found, sizes = layouts(conf, machine, target), _sizes(target, draft, store, states=conf.states)
    stays = lasting(conf, target, draft)
    plan = Plan(
        conf=conf, machine=machine, dtype=dtype, sizes=sizes,
        options=[
            Option(layout=layout, lasting=_with_share(stays, conf, dtype, layout.tensor))
            for layout in found
        ],
    )  # fmt: skip
    for option in plan.options:
        if option.least <= plan.limit:
            follow(option, conf, machine, dtype)
        if plan.fits(option) and option.layout.processes == machine.all_cores:
            break  # more cores a target would only repeat more of the draft's work
    return plan


def graphs_of(plan: Plan) -> int:
    """Graphs that a process of the proposed layout compiles before the evaluation at the end."""
    conf, found = plan.conf, plan.best.layout
    split = found.tensor > 1 or found.target is Weights.sharded
    parallel = ParallelConf(target=Weights.sharded if split else Weights.replicated)
    optim = replace(conf.optim, batch_size=found.rows, accumulation=found.micros)
    return len(graphs(replace(conf, parallel=parallel, optim=optim)))


def _models(conf: Options, dtype: torch.dtype, tensor: int = 1) -> tuple[Outline, Draft]:
    target = outline(conf.target, dtype)
    draft = outlined(conf.draft, target, loss=conf.loss, seed=conf.seed)
    if tensor > 1:
        share(target, tensor, whole=head_names(target))
    return target, draft


def _sizes(target: Outline, draft: Draft, store: Manifest | None, *, states: int) -> Sizes:
    values = (1 + len(draft.needs.layers)) * target.hidden_size
    live = values * target.device.dtype.itemsize
    return Sizes(
        target=target.parameters,
        draft=sum(p.numel() for p in draft.parameters()),
        trained=sum(p.numel() for p in learning(draft)),
        layers=draft.needs.layers,
        feature_bytes=live if store is None else round(store.bytes / store.made.tokens),
        disk=room(draft, target, states=states),
    )


def _with_share(stays: Phase, conf: Options, dtype: torch.dtype, tensor: int) -> Phase:
    """With the weights of the target that one of `tensor` cores holds."""
    target = outline(conf.target, dtype)
    if tensor > 1:
        share(target, tensor, whole=head_names(target))
    weights = sum(p.nbytes for p in target.model.parameters())
    return replace(stays, held=Counter({**stays.held, TARGET: weights}))


def follow(option: Option, conf: Options, machine: MachineConf, dtype: torch.dtype) -> None:
    """Trace a run of this layout."""
    found = option.layout
    optim = replace(conf.optim, batch_size=found.rows, accumulation=found.micros)
    target, draft = _models(conf, dtype, found.tensor)
    store = compatibility.described(conf.data, target, draft)
    option.trace = trace(
        replace(conf, optim=optim), target, draft, prompt=conf.longest_prompt,
        foreach=machine.name != HERE, stored=store and store.made.layout,
    )  # fmt: skip
    option.speed = speed(option.trace, found, machine)

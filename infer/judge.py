"""Every mode on every held-out prompt, prompt by prompt, in one process: what a report holds."""

import logging
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from rich.progress import track

from data.prompts import EvalPrompt, fingerprint, held_out
from infer.config import EvaluationConf, Verification
from infer.decode import Decoder, bucket
from infer.exactness import Recorded, compare, near_tie_gap
from infer.measured import AdaptedTarget, DraftRun, Measured, Memory, NotMeasured, Setting
from infer.report import build
from infer.stats import Costs, Trace
from models.cache import StaticCache
from models.device import graphs
from models.drafts.base import Draft
from models.drafts.ngram import NgramDraft
from models.errors import UserError
from models.target import Target
from models.tree import Tree, TreeConf, TreeKind

log = logging.getLogger(__name__)
PLAIN = "autoregressive"
REPEATS = 30  # timings of one verification and one draft pass; the median counts


@dataclass(kw_only=True)
class Candidate:
    """A draft to judge, and itself before distillation (or why that cannot be had).

    `target` is its own, where its method adapted one: that verifies it, and is compared with.
    """

    name: str
    draft: Draft
    untrained: Draft | str
    target: Target | None = None

    @property
    def baseline(self) -> str:
        """The autoregressive mode that its speed and its answers are compared with."""
        return f"{self.name}/{PLAIN}" if self.target else PLAIN


@dataclass(kw_only=True)
class Contender:
    """A mode: how it decodes, and the autoregressive mode of the same target."""

    decoder: Decoder
    baseline: str
    verification: Verification = Verification.exact
    calibrates: bool = True  # its logits tell how far rounding moves them


def evaluate(
    target: Target, candidates: list[Candidate], *, tree: TreeConf, conf: EvaluationConf
) -> dict[str, Any]:
    """The report of all modes. Raises UserError before decoding where something does not fit."""
    with target.device.shared_if_worth(target.parameters // target.num_layers):
        return _judge(target, candidates, tree.build(), conf)


def _judge(
    target: Target, candidates: list[Candidate], shape: Tree, conf: EvaluationConf
) -> dict[str, Any]:
    prompts = held_out(target.tokenizer, conf.prompts, limit=conf.limit)
    _check_depth(candidates, shape)
    modes = _contenders(target, candidates, shape, prompts, conf)
    for name, mode in modes.items():
        _warn_depth(name, mode.decoder)
    gaps = _warm_up(modes, prompts, conf)
    before = graphs()
    traces = _decode_all(modes, prompts, conf)
    after = graphs() - before
    costs = _costs(modes)
    measured = {
        name: Measured(
            traces=traces[name],
            exactness=compare(
                modes[mode.baseline].decoder, prompts, traces[mode.baseline], traces[name],
                gaps[mode.baseline],
            ),
            verification=mode.verification.value,
            costs=costs.get(name),
            graphs_after_warmup=after,
        )
        for name, mode in modes.items()
    }  # fmt: skip
    return build(
        _setting(target, prompts, shape, conf),
        autoregressive=measured[PLAIN],
        ngram=measured["ngram"],
        drafts=[
            DraftRun(
                name=c.name,
                method=c.draft.method,
                parameters=sum(p.numel() for p in c.draft.parameters()),
                memory=_memory(c.draft, modes[f"{c.name}/tree"].decoder),
                untrained=measured.get(f"{c.name}/untrained")
                or NotMeasured(reason=str(c.untrained)),
                chain=measured[f"{c.name}/chain"],
                tree=measured[f"{c.name}/tree"],
                target=_adapted(c, target, measured),
            )
            for c in candidates
        ],
    )


def _check_depth(candidates: list[Candidate], tree: Tree) -> None:
    """Of several drafts, say which of them the tree is too deep for."""
    for c in candidates:
        if len(candidates) > 1 and tree.depth > c.draft.max_depth:
            raise UserError(
                f"tree.depth: must be at most the {c.draft.max_depth} tokens that {c.name} can "
                f"propose, got {tree.depth}; lower tree.depth or leave {c.name} out"
            )


def _contenders(
    target: Target, candidates: list[Candidate], tree: Tree, prompts: list[EvalPrompt],
    conf: EvaluationConf,
) -> dict[str, Contender]:  # fmt: skip
    chain = TreeConf(kind=TreeKind.chain, depth=tree.depth).build()
    slots = max(len(prompt.ids) for prompt in prompts) + conf.max_new_tokens
    decoder = partial(Decoder, sampling=conf.sampling, slots=slots)
    sharing = [c.draft.needs.layers for c in candidates if c.target is None]
    # what is not trained captures the least that some draft does: it shares that draft's graphs
    least = min(sharing, key=len, default=[])
    modes = {
        PLAIN: Contender(decoder=decoder(target, layers=least), baseline=PLAIN),
        "ngram": Contender(
            decoder=decoder(target, NgramDraft(), chain, layers=least), baseline=PLAIN
        ),
    }
    for c in candidates:
        own = c.target or target
        if c.target:
            alone = decoder(own, layers=c.draft.needs.layers)
            modes[c.baseline] = Contender(decoder=alone, baseline=c.baseline)
        tried = {
            "untrained": (c.untrained, tree),
            "chain": (c.draft, chain),
            "tree": (c.draft, tree),
        }
        for name, (draft, shape) in tried.items():
            if isinstance(draft, Draft):
                modes[f"{c.name}/{name}"] = Contender(
                    decoder=decoder(own, draft, shape, verification=conf.typical),
                    baseline=c.baseline,
                    verification=conf.verification,
                    # all drafts have trees of one shape: the first of a target tells of the others
                    calibrates=c is next(o for o in candidates if o.baseline == c.baseline),
                )
    return modes


def _warn_depth(name: str, decoder: Decoder) -> None:
    depth = decoder.tree.depth
    trained = decoder.draft.trained_depth if decoder.draft else depth
    if depth > trained and name.endswith("/tree"):
        log.warning(
            "tree.depth: %d is deeper than the %d steps that %s was trained for; "
            "deep nodes are rarely accepted",
            depth, trained, name.removesuffix("/tree"),
        )  # fmt: skip


def _warm_up(
    modes: dict[str, Contender], prompts: list[EvalPrompt], conf: EvaluationConf
) -> dict[str, float]:
    """Compile every graph; return each target's near-tie gap between one-token and tree passes."""
    few = list({bucket(len(p.ids)): p for p in prompts}.values())
    few += {p.category: p for p in prompts}.values()
    recorded: dict[str, list[Recorded]] = {}
    for name, mode in track(modes.items(), "warming up", disable=not sys.stderr.isatty()):
        for prompt in few:
            record: list[torch.Tensor] = []
            done = mode.decoder.decode(
                [prompt.ids], row_ids=[prompt.row_id],
                max_new_tokens=conf.max_new_tokens, record=record if mode.calibrates else None,
            )  # fmt: skip
            if mode.calibrates:
                emitted = (torch.tensor(done[0].ids), torch.cat(record).cpu())
                recorded.setdefault(name, []).append(emitted)
    return {
        plain: near_tie_gap(
            recorded[plain],
            [
                theirs
                for name, theirs in recorded.items()
                if modes[name].baseline == plain and name != plain
            ],
        )
        for plain in {mode.baseline for mode in modes.values()}
    }


def _decode_all(
    modes: dict[str, Contender], prompts: list[EvalPrompt], conf: EvaluationConf
) -> dict[str, list[Trace]]:
    """Every mode on a prompt before the next prompt, in turning order: clock drift cancels."""
    traces: dict[str, list[Trace]] = {name: [] for name in modes}
    names = list(modes)
    quiet = not sys.stderr.isatty()
    for number, prompt in enumerate(track(prompts, "held-out prompts", disable=quiet)):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            decoder = modes[name].decoder
            (done,) = decoder.decode(
                [prompt.ids], row_ids=[prompt.row_id],
                max_new_tokens=conf.max_new_tokens, eos_ids=decoder.target.eos_ids,
            )  # fmt: skip
            traces[name].append(
                Trace(
                    prompt_id=prompt.id,
                    category=prompt.category,
                    depth=decoder.depth,
                    **asdict(done),
                )
            )
    return traces


def _costs(modes: dict[str, Contender]) -> dict[str, Costs]:
    """Seconds of a draft and a verify pass by themselves, of each mode, in its last state."""
    alone = {name: pass_seconds(mode.decoder) for name, mode in modes.items()}
    return {
        name: Costs(draft_s=draft, verify_s=verify, step_s=alone[modes[name].baseline][0])
        for name, (verify, draft) in alone.items()
        if modes[name].decoder.draft is not None
    }


def pass_seconds(decoder: Decoder) -> tuple[float, float]:
    """Median seconds of one verification, and of one draft pass (0 without a draft)."""
    synchronize = decoder.target.device.synchronize
    verify, draft = [], []
    for _ in range(REPEATS):
        began = time.perf_counter()
        decoder.verify_again()
        synchronize()
        then = time.perf_counter()
        decoder.draft_again()
        synchronize()
        verify.append(then - began)
        draft.append(time.perf_counter() - then)
    return statistics.median(verify), statistics.median(draft) if decoder.draft else 0.0


def _memory(draft: Draft, decoder: Decoder) -> Memory:
    return Memory(
        weights=held_bytes([*draft.parameters(), *draft.buffers()]), state=held_bytes(decoder.state)
    )


def held_bytes(held: Any) -> int:
    """Of the tensors that are held, however deep, in what a method calls its state.

    >>> held_bytes({"lengths": torch.zeros(2, dtype=torch.int64), "keys": [torch.zeros(3)]})
    28
    """
    if isinstance(held, torch.Tensor):
        return held.numel() * held.element_size()
    if isinstance(held, StaticCache):
        held = held.keys + held.values
    inner = held.values() if isinstance(held, dict) else held if isinstance(held, list) else ()
    return sum(map(held_bytes, inner))


def _adapted(
    one: Candidate, original: Target, measured: dict[str, Measured]
) -> AdaptedTarget | None:
    return one.target and AdaptedTarget(
        name=one.target.name,
        parameters=one.target.parameters,
        adapted_from=original.name,
        autoregressive=measured[one.baseline],
    )


def _setting(
    target: Target, prompts: list[EvalPrompt], tree: Tree, conf: EvaluationConf
) -> Setting:
    return Setting(
        command=" ".join(["python", "-m", *sys.orig_argv[2:]][:20]),
        versions={
            "python": sys.version.split()[0],
            **{name: version(name) for name in ("torch", "transformers")},
        },
        device=target.device.describe(),
        target=target.name,
        target_parameters=target.parameters,
        prompts_sha256=fingerprint(prompts),
        max_new_tokens=conf.max_new_tokens,
        sampling=asdict(conf.sampling),
        tree=tree.describe(),
    )

"""Every mode on every held-out prompt, prompt by prompt, in one process: what a report holds."""

import logging
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
from rich.progress import track

from data.prompts import EvalPrompt, fingerprint, held_out
from infer.config import EvaluationConf
from infer.decode import Decoder, bucket
from infer.exactness import Recorded, compare, near_tie_gap
from infer.report import DraftRun, Measured, NotMeasured, Setting, build
from infer.stats import Costs, Trace
from models.device import graphs
from models.drafts.base import Draft
from models.drafts.ngram import NgramDraft
from models.target import Target
from models.tree import NO_TREE, Tree, TreeConf, TreeKind

log = logging.getLogger(__name__)
REPEATS = 30  # timings of one verification and one draft pass; the median counts


@dataclass(kw_only=True)
class Candidate:
    """A draft to judge, and itself before distillation (or why that cannot be had)."""

    name: str
    draft: Draft
    untrained: Draft | str


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
    modes = _modes(target, candidates, shape, prompts, conf)
    for name, decoder in modes.items():
        _warn_depth(name, decoder)
    gap = _warm_up(modes, prompts, conf)
    before = graphs()
    traces = _decode_all(target, modes, prompts, conf)
    after = graphs() - before
    costs = _costs(modes)
    measured = {
        name: Measured(
            traces=traces[name],
            exactness=compare(
                modes["autoregressive"], prompts, traces["autoregressive"], traces[name], gap
            ),
            costs=costs.get(name),
            graphs_after_warmup=after,
        )
        for name in modes
    }
    drafts = [
        DraftRun(
            name=c.name,
            method=c.draft.method,
            parameters=sum(p.numel() for p in c.draft.parameters()),
            untrained=measured.get(f"{c.name}/untrained") or NotMeasured(reason=str(c.untrained)),
            chain=measured[f"{c.name}/chain"],
            tree=measured[f"{c.name}/tree"],
        )
        for c in candidates
    ]
    return build(
        _setting(target, prompts, shape, conf),
        autoregressive=measured["autoregressive"],
        ngram=measured["ngram"],
        drafts=drafts,
    )


def _modes(
    target: Target, candidates: list[Candidate], tree: Tree, prompts: list[EvalPrompt],
    conf: EvaluationConf,
) -> dict[str, Decoder]:  # fmt: skip
    chain = TreeConf(kind=TreeKind.chain, depth=tree.depth).build()
    slots = max(len(prompt.ids) for prompt in prompts) + conf.max_new_tokens

    # what is not trained captures the least that some draft does: it shares that draft's graphs
    least = min((c.draft.needs.layers for c in candidates), key=len, default=[])

    def decoder(
        draft: Draft | None = None, shape: Tree = NO_TREE, layers: list[int] | None = None
    ) -> Decoder:
        return Decoder(
            target, draft, shape, sampling=conf.sampling, slots=slots, layers=layers
        )  # fmt: skip

    modes = {
        "autoregressive": decoder(layers=least),
        "ngram": decoder(NgramDraft(), chain, layers=least),
    }
    for c in candidates:
        if isinstance(c.untrained, Draft):
            modes[f"{c.name}/untrained"] = decoder(c.untrained, tree)
        modes[f"{c.name}/chain"] = decoder(c.draft, chain)
        modes[f"{c.name}/tree"] = decoder(c.draft, tree)
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


def _warm_up(modes: dict[str, Decoder], prompts: list[EvalPrompt], conf: EvaluationConf) -> float:
    """Compile every graph; return the near-tie gap between one-token and tree passes."""
    few = list({bucket(len(p.ids)): p for p in prompts}.values())
    few += {p.category: p for p in prompts}.values()
    recorded: dict[str, list[Recorded]] = {}
    for name in track(modes, "warming up", disable=not sys.stderr.isatty()):
        for prompt in few:
            record: list[torch.Tensor] = []
            done = modes[name].decode(
                [prompt.ids], row_ids=[prompt.row_id],
                max_new_tokens=conf.max_new_tokens, record=record,
            )  # fmt: skip
            emitted = (torch.tensor(done[0].ids), torch.cat(record).cpu())
            recorded.setdefault(name, []).append(emitted)
    plain = recorded.pop("autoregressive")
    return near_tie_gap(plain, list(recorded.values()))


def _decode_all(
    target: Target, modes: dict[str, Decoder], prompts: list[EvalPrompt], conf: EvaluationConf
) -> dict[str, list[Trace]]:
    """Every mode on a prompt before the next prompt, in turning order: clock drift cancels."""
    traces: dict[str, list[Trace]] = {name: [] for name in modes}
    names = list(modes)
    quiet = not sys.stderr.isatty()
    for number, prompt in enumerate(track(prompts, "held-out prompts", disable=quiet)):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            (done,) = modes[name].decode(
                [prompt.ids], row_ids=[prompt.row_id],
                max_new_tokens=conf.max_new_tokens, eos_ids=target.eos_ids,
            )  # fmt: skip
            traces[name].append(
                Trace(
                    prompt_id=prompt.id,
                    category=prompt.category,
                    depth=modes[name].depth,
                    **asdict(done),
                )
            )
    return traces


def _costs(modes: dict[str, Decoder]) -> dict[str, Costs]:
    """Seconds of a draft and a verify pass by themselves, of each mode, in its last state."""
    (step, _) = pass_seconds(modes["autoregressive"])
    costs = {}
    for name, decoder in modes.items():
        if decoder.draft is not None:
            verify, draft = pass_seconds(decoder)
            costs[name] = Costs(draft_s=draft, verify_s=verify, step_s=step)
    return costs


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

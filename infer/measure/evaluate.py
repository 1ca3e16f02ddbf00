"""Every mode on every held-out prompt, prompt by prompt, in one process: what a report holds."""

import logging
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
from rich.progress import track

from data.eval_prompts.contamination import Contamination, contaminated
from data.eval_prompts.prompts import EvalPrompt, fingerprint, held_out, later_turns, origin
from infer.config import EvaluationConf
from infer.engine import graph_plan
from infer.engine.decode import Decoder, bucket
from infer.engine.generate import answers
from infer.measure.batched import Baseline, at_batches
from infer.measure.eval_modes import (
    PLAIN,
    Candidate,
    Contender,
    check_depth,
    contenders,
    warn_depth,
)
from infer.measure.exactness import compare, measure_yardstick
from infer.measure.intervals import bootstrap_t
from infer.measure.metrics import estimate
from infer.measure.prompt_choice import longest_row
from infer.measure.records import Costs, Exactness, Trace, Yardstick
from infer.measure.replay import Replay, all_positions, on_policy, texts
from infer.measure.report import Report, build
from infer.measure.results import (
    AdaptedTarget,
    DraftRun,
    Measured,
    Memory,
    NotMeasured,
    Replayed,
    Setting,
    Split,
)
from infer.measure.samples import samples
from infer.measure.timing import bottleneck, costs, in_turns, splits
from models.device.graph_budget import Graph, Run
from models.drafts.base import Draft
from models.speculate.tree import Tree, TreeConf
from models.target.cache import StaticCache
from models.target.target import Target

log = logging.getLogger(__name__)


def evaluate(
    target: Target, candidates: list[Candidate], *, tree: TreeConf, conf: EvaluationConf,
    say: Callable[[str], None] = log.info,
) -> Report:  # fmt: skip
    """The report of all modes. Raises UserError before decoding where something does not fit."""
    with target.device.shared_if_worth(target.parameters // target.num_layers):
        return _judge(target, candidates, tree.build(), conf, say)


def _judge(
    target: Target, candidates: list[Candidate], shape: Tree, conf: EvaluationConf,
    say: Callable[[str], None],
) -> Report:  # fmt: skip
    prompts, needed = asked(target, candidates, shape, conf)
    with target.device.expecting(needed, say) as counted:
        with target.device.ledger.warming():
            modes = contenders(target, candidates, shape, prompts, conf)
            for name, mode in modes.items():
                warn_depth(name, mode.decoder)
            by = _warm_up(modes, prompts, conf)
        traces = _decode_all(modes, prompts, conf)
        parts = splits(modes, prompts, max_new_tokens=conf.new_tokens)
        known = costs(modes, parts)
        measured = {
            name: _measured(name, modes, prompts, traces, by, parts, known) for name in modes
        }
        drafts = [_run(c, target, modes, measured, prompts, shape, by, conf) for c in candidates]
    for mode in measured.values():
        mode.graphs_after_warmup = counted and counted.late
    return build(
        _setting(target, prompts, shape, conf, counted), autoregressive=measured[PLAIN],
        ngram=measured["ngram"], drafts=drafts,
    )  # fmt: skip


def asked(
    target: Target, candidates: list[Candidate], shape: Tree, conf: EvaluationConf
) -> tuple[list[EvalPrompt], set[Graph]]:
    """The prompts of an evaluation, and the graphs that it will need."""
    check_depth(candidates, shape)
    conf.verifier.check(conf.sampling, shape)
    prompts = _all_turns(target, conf)
    needed = graph_plan.evaluation(
        [graph_plan.Drafting.of(c.draft, c.target) for c in candidates], tree=shape,
        prompts=[len(prompt.ids) for prompt in prompts], conf=conf, fused=target.device.fuses,
        lazy=target.device.lazy,
    )  # fmt: skip
    return prompts, needed


def _all_turns(target: Target, conf: EvaluationConf) -> list[EvalPrompt]:
    """The prompts, and behind them later turns, each after the target's own answers."""
    turn = found = held_out(target.tokenizer, conf.prompts, limit=conf.limit)
    for _ in range(1, conf.turns):
        asked = [prompt for prompt in turn if prompt.later]
        said = answers(
            target.eager(),  # what comes of it is not known when graphs are announced
            [prompt.ids for prompt in asked], max_new_tokens=conf.new_tokens,
            sampling=conf.sampling, row_ids=[prompt.row_id for prompt in asked],
        )  # fmt: skip
        turn = later_turns(target.tokenizer, asked, [ids for _, ids in sorted(said)])
        found = found + turn
    return found


def _measured(
    name: str, modes: dict[str, Contender], prompts: list[EvalPrompt],
    traces: dict[str, list[Trace]], by: dict[str, Yardstick], parts: dict[str, Split],
    known: dict[str, Costs],
) -> Measured:  # fmt: skip
    mode = modes[name]
    exactness = Exactness()  # nothing to compare where answers need not be the same
    if mode.compares:
        exactness = compare(
            modes[mode.baseline].decoder, prompts, traces[mode.baseline], traces[name],
            by[mode.baseline],
        )  # fmt: skip
    why = None
    tau = estimate("acceptance_length", traces[name], traces[mode.baseline])
    if name in known and tau is not None:
        why = bottleneck(parts[name], parts[mode.baseline], tau.mean)
    return Measured(
        traces=traces[name],
        exactness=exactness,
        verification=mode.decoder.plan.verifier.name,
        costs=known.get(name),
        draft_passes=mode.draft_passes,
        split=parts.get(name),
        bottleneck=why,
    )


def _run(
    one: Candidate, target: Target, modes: dict[str, Contender], measured: dict[str, Measured],
    prompts: list[EvalPrompt], shape: Tree, by: dict[str, Yardstick], conf: EvaluationConf,
) -> DraftRun:  # fmt: skip
    own = one.target or target
    baseline = Baseline(
        decoder=modes[one.baseline].decoder, traces=measured[one.baseline].traces,
        yardstick=by[one.baseline],
    )  # fmt: skip
    return DraftRun(
        name=one.name,
        method=one.draft.method,
        parameters=sum(p.numel() for p in one.draft.parameters()),
        memory=_memory(one.draft, modes[f"{one.name}/tree"].decoder),
        untrained=measured.get(f"{one.name}/untrained") or NotMeasured(reason=str(one.untrained)),
        chain=measured[f"{one.name}/chain"],
        tree=measured[f"{one.name}/tree"],
        target=_adapted(one, target, measured),
        contamination=_contamination(one, prompts),
        batches=at_batches(own, one, shape, prompts, conf, baseline),
        replayed=_replayed(own, one, prompts, shape, conf),
        longest_row=one.directory and longest_row(one.directory),
        samples=samples(own, prompts, measured[f"{one.name}/tree"].traces, mode="tree"),
    )


def _contamination(one: Candidate, prompts: list[EvalPrompt]) -> Contamination | None:
    return one.directory and contaminated(prompts, one.directory)


def _replayed(
    target: Target, one: Candidate, prompts: list[EvalPrompt], shape: Tree, conf: EvaluationConf
) -> Replayed | None:
    if not conf.replay:
        return None
    read = texts(
        target, prompts, sampling=conf.sampling, max_new_tokens=conf.new_tokens,
        layers=one.draft.needs.layers, ahead=shape.deepest,
    )  # fmt: skip
    replay = Replay(target, one.draft, read, sampling=conf.sampling, verification=conf.verification)
    accepted = replay.accepted({"tree": shape})["tree"]
    tau, anywhere = (bootstrap_t(rows(accepted)) for rows in (on_policy, all_positions))
    if tau is None or anywhere is None:
        return None
    return Replayed(tau=tau, all_positions=anywhere)


def choose_few(prompts: list[EvalPrompt]) -> list[EvalPrompt]:
    """Choose a prompt of each padded length and of each category, to warm up with."""
    few = list({bucket(len(p.ids)): p for p in prompts}.values())
    return few + list({p.category: p for p in prompts}.values())


def _warm_up(
    modes: dict[str, Contender], prompts: list[EvalPrompt], conf: EvaluationConf
) -> dict[str, Yardstick]:
    """Compile every graph; return what each autoregressive mode's answers are compared by."""
    few = choose_few(prompts)
    found: dict[str, Yardstick] = {}
    for name, mode in track(modes.items(), "warming up", disable=not sys.stderr.isatty()):
        if name == mode.baseline:
            found[name] = measure_yardstick(mode.decoder, few, max_new_tokens=conf.new_tokens)
            continue
        for prompt in few:
            mode.decoder.decode(
                [prompt.ids], row_ids=[prompt.row_id], max_new_tokens=conf.new_tokens
            )
    return found


def _decode_all(
    modes: dict[str, Contender], prompts: list[EvalPrompt], conf: EvaluationConf
) -> dict[str, list[Trace]]:
    """Every mode on a prompt before the next prompt, in turns."""
    traces: dict[str, list[Trace]] = {name: [] for name in modes}
    quiet = not sys.stderr.isatty()
    for number, prompt in enumerate(track(prompts, "held-out prompts", disable=quiet)):
        for name in in_turns(list(modes), number):
            decoder = modes[name].decoder
            (done,) = decoder.decode(
                [prompt.ids], row_ids=[prompt.row_id],
                max_new_tokens=conf.new_tokens, eos_ids=decoder.target.eos_ids,
            )  # fmt: skip
            traces[name].append(Trace.of(prompt, done, depth=decoder.depth))
    return traces


def _memory(draft: Draft, decoder: Decoder) -> Memory:
    return Memory(weights=_bytes_of(draft), state=held_bytes(decoder.state))


def _bytes_of(model: torch.nn.Module) -> int:
    return held_bytes([*model.parameters(), *model.buffers()])


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
        weight_bytes=_bytes_of(one.target.model),
    )


def _setting(
    target: Target, prompts: list[EvalPrompt], tree: Tree, conf: EvaluationConf,
    counted: Run | None,
) -> Setting:  # fmt: skip
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
        prompts_source=origin(prompts, conf.prompts),
        prompts_rendered=sum(prompt.chat_template for prompt in prompts),
        max_new_tokens=conf.new_tokens,
        sampling=asdict(conf.sampling),
        tree=tree.describe(),
        target_weight_bytes=_bytes_of(target.model),
        graphs=counted and counted.counts(),
    )

"""Evaluate drafts: decode every held-out prompt in every mode, and build the report."""

import datetime
import itertools
import logging
import shlex
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version

import torch
from jaxtyping import Int
from numpy import ndarray

from data.eval_prompts.contamination import check_contamination
from data.eval_prompts.held_out_files import read_longest_row
from data.eval_prompts.prompts import EvalPrompt, build_next_turns, load_eval_prompts
from infer.config import EvaluationConf
from infer.engine.admission import bucket_length
from infer.engine.generate import generate_answers
from infer.engine.graph_plan import list_graphs
from infer.engine.row_tensors import tensor_bytes
from infer.measure.batched import build_decoders, decode_prompts, measure_batch_size
from infer.measure.curve import read_curve
from infer.measure.eval_modes import (
    AUTOREGRESSIVE_MODE,
    DraftUnderTest,
    EvalMode,
    build_eval_modes,
    build_evaluation_rule,
    check_tree_depth,
    warn_tree_depth,
)
from infer.measure.exactness import compare_answers, measure_tolerance
from infer.measure.intervals import bootstrap_t
from infer.measure.metrics import estimate_metric, sum_by_question
from infer.measure.records import (
    AdaptedTarget,
    DraftResult,
    Exactness,
    LogitTolerance,
    ModeResult,
    PromptResult,
)
from infer.measure.replay import Replay, collect_replay_texts, count_all_positions, count_on_policy
from infer.measure.report import build_report, describe_prompts
from infer.measure.report_schema import (
    SCHEMA_VERSION,
    DeviceInfo,
    DraftMemory,
    EvalReport,
    EvalSetup,
    ReplayResult,
    RoundSplit,
    TargetInfo,
    TreeInfo,
)
from infer.measure.samples import collect_samples
from infer.measure.sections import DRAFT_MODES
from infer.measure.timing import (
    WARMUP_TOKENS,
    alternate_order,
    derive_costs,
    describe_bottleneck,
    measure_splits,
)
from models.console import track_progress
from models.device.graph_budget import Graph, GraphBudget
from models.speculate.config import TreeConf
from models.speculate.tree import Tree
from models.target.target import Target

log = logging.getLogger(__name__)

CheckAnswers = Callable[[list[PromptResult]], Exactness]


def evaluate_drafts(
    target: Target, candidates: list[DraftUnderTest], *, tree: TreeConf, conf: EvaluationConf,
    print_line: Callable[[str], None] = log.info,
) -> EvalReport:  # fmt: skip
    """Evaluate the drafts in all modes; raise UserError before decoding if settings conflict."""
    with target.device.cpu_threads_for(target.num_parameters // target.num_layers):
        return _run_evaluation(target, candidates, tree.build(), conf, print_line)


def _run_evaluation(
    target: Target, candidates: list[DraftUnderTest], tree: Tree, conf: EvaluationConf,
    print_line: Callable[[str], None],
) -> EvalReport:  # fmt: skip
    prompts, modes, needed_graphs = plan_evaluation(target, candidates, tree, conf)
    for name, mode in modes.items():
        warn_tree_depth(name, mode.decoder)
    with target.device.expect_graphs(needed_graphs, print_line) as graph_budget:
        with target.device.ledger.warming():
            tolerances = _warm_up_modes(modes, prompts, conf)
        results = _decode_all_modes(modes, prompts, conf)
        checks = {
            name: partial(_check_answers, mode, modes, results, tolerances)
            for name, mode in modes.items()
        }
        splits = (
            measure_splits(modes, prompts, max_new_tokens=conf.new_tokens) if conf.phases else {}
        )
        mode_results = _build_mode_results(modes, results, checks, splits)
        drafts = [
            _measure_draft(candidate, target, modes, mode_results, prompts, tree, checks, conf)
            for candidate in candidates
        ]
    for mode_result in mode_results.values():
        mode_result.graphs_after_warmup = graph_budget and graph_budget.compiled_late
    return build_report(
        _describe_setup(target, candidates, prompts, tree, conf, graph_budget),
        autoregressive=mode_results[AUTOREGRESSIVE_MODE],
        ngram=mode_results["ngram"],
        drafts=drafts,
        target_bytes=_model_bytes(target.model),
    )


def _describe_setup(
    target: Target, candidates: list[DraftUnderTest], prompts: list[EvalPrompt], tree: Tree,
    conf: EvaluationConf, graph_budget: GraphBudget | None,
) -> EvalSetup:  # fmt: skip
    return EvalSetup(
        schema_version=SCHEMA_VERSION,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=shlex.join(["python", "-m", *sys.orig_argv[2:]]),
        versions={
            "python": sys.version.split()[0],
            **{name: version(name) for name in ("torch", "transformers")},
        },
        device=DeviceInfo(**target.device.describe()),
        graphs=graph_budget and graph_budget.counts(),
        target=TargetInfo(name=target.name, parameters=target.num_parameters),
        sampling=conf.sampling,
        tree=TreeInfo(
            kind=tree.kind.value, depth=tree.depth, nodes=tree.nodes, copied=tree.ngram_tokens
        ),
        prompts=describe_prompts(
            prompts,
            conf.prompts,
            max_new_tokens=conf.new_tokens,
            contamination={
                candidate.name: check_contamination(prompts, candidate.directory)
                for candidate in candidates
                if candidate.directory
            },
        ),
    )


def plan_evaluation(
    target: Target, candidates: list[DraftUnderTest], tree: Tree, conf: EvaluationConf
) -> tuple[list[EvalPrompt], dict[str, EvalMode], set[Graph]]:
    """Return the prompts of an evaluation, its modes, and the graphs that it will need.

    Raise UserError if drafts, tree and acceptance rule do not fit.
    """
    check_tree_depth(candidates, tree)
    build_evaluation_rule(conf).check(conf.sampling, tree)
    prompts = _load_all_turns(target, conf)
    modes = build_eval_modes(target, candidates, tree, prompts, conf)
    decoders = [(mode.decoder, mode.timed and conf.phases) for mode in modes.values()]
    for candidate, batch in itertools.product(candidates, conf.batch_sizes):
        batched = build_decoders(target, candidate, tree, prompts, conf, batch)
        decoders += [(decoder, False) for decoder in batched.values()]
    lengths = [len(prompt.ids) for prompt in prompts]
    return prompts, modes, {
        graph
        for decoder, in_parts in decoders
        for graph in list_graphs(decoder.session, lengths, in_parts=in_parts)
    }  # fmt: skip


def _load_all_turns(target: Target, conf: EvaluationConf) -> list[EvalPrompt]:
    """Load the prompts, followed by later turns, which continue the target's own answers."""
    turn_prompts = prompts = load_eval_prompts(
        target.tokenizer, conf.prompts, limit=conf.prompts_per_category
    )
    for _ in range(1, conf.turns):
        unfinished = [prompt for prompt in turn_prompts if prompt.remaining_turns]
        answers = generate_answers(
            target.eager(),  # graphs are announced only once the prompts are known
            [prompt.ids for prompt in unfinished], max_new_tokens=conf.new_tokens,
            sampling=conf.sampling, row_ids=[prompt.row_id for prompt in unfinished],
        )  # fmt: skip
        turn_prompts = build_next_turns(
            target.tokenizer, unfinished, [ids for _, ids in sorted(answers)]
        )
        prompts = prompts + turn_prompts
    return prompts


def _check_answers(
    mode: EvalMode,
    modes: dict[str, EvalMode],
    results: dict[str, list[PromptResult]],
    tolerances: dict[str, LogitTolerance],
    answers: list[PromptResult],
) -> Exactness:
    """Return how answers in a mode compare with those of its baseline.

    Ratio tests draw different answers, so there is nothing to compare.
    """
    if mode.decoder.program.acceptance_rule.verification.is_ratio_test:
        return Exactness()
    base = mode.baseline
    return compare_answers(modes[base].decoder, results[base], answers, tolerances[base])


def _build_mode_results(
    modes: dict[str, EvalMode],
    results: dict[str, list[PromptResult]],
    checks: dict[str, CheckAnswers],
    splits: dict[str, RoundSplit],
) -> dict[str, ModeResult]:
    costs, mode_results = derive_costs(modes, splits), {}
    for name, mode in modes.items():
        tau = estimate_metric("acceptance_length", results[name], results[mode.baseline])
        draft = mode.decoder.draft
        mode_results[name] = ModeResult(
            prompt_results=results[name],
            exactness=checks[name](results[name]),
            verification=mode.decoder.program.acceptance_rule.name,
            costs=costs.get(name),
            draft_passes=draft and draft.passes(mode.decoder.tree.depth),
            split=splits.get(name),
            bottleneck=describe_bottleneck(splits[name], splits[mode.baseline], tau.mean)
            if name in costs and tau is not None
            else None,
        )
    return mode_results


def _measure_draft(
    candidate: DraftUnderTest,
    target: Target,
    modes: dict[str, EvalMode],
    mode_results: dict[str, ModeResult],
    prompts: list[EvalPrompt],
    tree: Tree,
    checks: dict[str, CheckAnswers],
    conf: EvaluationConf,
) -> DraftResult:
    adapted, untrained = candidate.adapted_target, candidate.untrained
    verifier, tree_mode = adapted or target, f"{candidate.name}/tree"
    return DraftResult(
        name=candidate.name,
        method=candidate.draft.method,
        num_parameters=sum(p.numel() for p in candidate.draft.parameters()),
        memory=DraftMemory(
            weights=_model_bytes(candidate.draft),
            state=tensor_bytes(modes[tree_mode].decoder.session.buffers[1]),
        ),
        modes={
            name: mode_results[key]
            for name in DRAFT_MODES
            if (key := f"{candidate.name}/{name}") in mode_results
        },
        not_measured={"untrained": untrained} if isinstance(untrained, str) else {},
        target=adapted
        and AdaptedTarget(
            name=adapted.name,
            parameters=adapted.num_parameters,
            adapted_from=target.name,
            weight_bytes=_model_bytes(adapted.model),
        ),
        batches=[
            measure_batch_size(target, candidate, tree, prompts, conf, batch, checks[tree_mode])
            for batch in conf.batch_sizes
        ],
        replay_result=_replay_draft(verifier, candidate, prompts, tree, conf),
        tuned_tree=candidate.tuned and candidate.tuned.description,
        longest_row=candidate.directory and read_longest_row(candidate.directory),
        curve=read_curve(candidate.directory) if candidate.directory else [],
        samples=collect_samples(
            verifier, mode_results[tree_mode].prompt_results, draft=candidate.name
        ),
    )


def _replay_draft(
    target: Target,
    candidate: DraftUnderTest,
    prompts: list[EvalPrompt],
    tree: Tree,
    conf: EvaluationConf,
) -> ReplayResult | None:
    if not conf.replay:
        return None
    texts = collect_replay_texts(
        target, prompts, sampling=conf.sampling, max_new_tokens=conf.new_tokens,
        layers=candidate.draft.needs.layers, lookahead=tree.max_path_length,
    )  # fmt: skip
    accepted = Replay(
        target, candidate.draft, texts, sampling=conf.sampling, verification=conf.verification
    ).accepted_lengths({"tree": tree})["tree"]
    return estimate_replay(accepted, [prompt.question for prompt in prompts])


def estimate_replay(
    accepted: list[Int[ndarray, " _"]], questions: list[str]
) -> ReplayResult | None:
    """Return the acceptance lengths of replayed texts, with intervals over their questions."""
    tau, all_positions = (
        bootstrap_t(sum_by_question(count(accepted), questions))
        for count in (count_on_policy, count_all_positions)
    )
    if tau is None or all_positions is None:
        return None
    return ReplayResult(tau=tau, all_positions=all_positions)


def choose_warmup_prompts(prompts: list[EvalPrompt]) -> list[EvalPrompt]:
    """Return one prompt of each padded length and one of each category, to warm up with."""
    return [
        *{bucket_length(len(p.ids)): p for p in prompts}.values(),
        *{p.category: p for p in prompts}.values(),
    ]


def _warm_up_modes(
    modes: dict[str, EvalMode], prompts: list[EvalPrompt], conf: EvaluationConf
) -> dict[str, LogitTolerance]:
    """Decode the warm-up prompts in every mode, so that all graphs are compiled.

    Return the logit tolerance of each autoregressive mode, measured on the same prompts.
    """
    warmup_prompts = choose_warmup_prompts(prompts)
    tolerances: dict[str, LogitTolerance] = {}
    for name, mode in track_progress(modes.items(), "warming up", total=len(modes)):
        if name == mode.baseline:
            tolerances[name] = measure_tolerance(
                mode.decoder, warmup_prompts, max_new_tokens=conf.new_tokens
            )
            continue
        for prompt in warmup_prompts:
            mode.decoder.decode(
                [prompt.ids], row_ids=[prompt.row_id],
                max_new_tokens=min(WARMUP_TOKENS, conf.new_tokens),
            )  # fmt: skip
    return tolerances


def _decode_all_modes(
    modes: dict[str, EvalMode], prompts: list[EvalPrompt], conf: EvaluationConf
) -> dict[str, list[PromptResult]]:
    """Decode each prompt in every mode, in alternating order, before the next prompt."""
    results: dict[str, list[PromptResult]] = {name: [] for name in modes}
    for number, prompt in enumerate(track_progress(prompts, "held-out prompts")):
        for name in alternate_order(list(modes), number):
            results[name] += decode_prompts(modes[name].decoder, [prompt], conf.new_tokens)
    return results


def _model_bytes(model: torch.nn.Module) -> int:
    return tensor_bytes([*model.parameters(), *model.buffers()])

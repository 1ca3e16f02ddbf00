"""Evaluate drafts: decode every held-out prompt in every mode, and build the report."""

import logging
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
from rich.progress import track

from data.eval_prompts.contamination import Contamination, check_contamination
from data.eval_prompts.prompts import (
    EvalPrompt,
    build_next_turns,
    describe_origin,
    fingerprint_prompts,
    load_eval_prompts,
)
from infer.config import EvaluationConf
from infer.engine import graph_plan
from infer.engine.admission import bucket_length
from infer.engine.decode import Decoder
from infer.engine.generate import generate_answers
from infer.measure.batched import Baseline, measure_batch_sizes
from infer.measure.eval_modes import (
    AUTOREGRESSIVE_MODE,
    DraftUnderTest,
    EvalMode,
    build_eval_modes,
    check_tree_depth,
    warn_tree_depth,
)
from infer.measure.exactness import compare_answers, measure_tolerance
from infer.measure.intervals import bootstrap_t
from infer.measure.metrics import estimate_metric
from infer.measure.prompt_choice import read_longest_row
from infer.measure.records import Exactness, LogitTolerance, PromptResult, RoundCosts
from infer.measure.replay import Replay, collect_replay_texts, count_all_positions, count_on_policy
from infer.measure.report import EvalReport, build_report
from infer.measure.results import (
    AdaptedTarget,
    DraftMemory,
    DraftResult,
    EvalSetup,
    ModeResult,
    NotMeasured,
    ReplayResult,
    RoundSplit,
)
from infer.measure.samples import collect_samples
from infer.measure.timing import alternate_order, derive_costs, describe_bottleneck, measure_splits
from models.device.graph_budget import Graph, GraphBudget
from models.drafts.base import Draft
from models.speculate.tree import Tree, TreeConf
from models.target.cache import StaticCache
from models.target.target import Target

log = logging.getLogger(__name__)


def evaluate_drafts(
    target: Target, candidates: list[DraftUnderTest], *, tree: TreeConf, conf: EvaluationConf,
    print_line: Callable[[str], None] = log.info,
) -> EvalReport:  # fmt: skip
    """Evaluate the drafts in all modes; raise UserError before decoding where settings conflict."""
    with target.device.cpu_threads_for(target.num_parameters // target.num_layers):
        return _run_evaluation(target, candidates, tree.build(), conf, print_line)


def _run_evaluation(
    target: Target, candidates: list[DraftUnderTest], tree: Tree, conf: EvaluationConf,
    print_line: Callable[[str], None],
) -> EvalReport:  # fmt: skip
    prompts, needed_graphs = plan_evaluation(target, candidates, tree, conf)
    with target.device.expect_graphs(needed_graphs, print_line) as graph_budget:
        with target.device.ledger.warming():
            modes = build_eval_modes(target, candidates, tree, prompts, conf)
            for name, mode in modes.items():
                warn_tree_depth(name, mode.decoder)
            tolerances = _warm_up_modes(modes, prompts, conf)
        results = _decode_all_modes(modes, prompts, conf)
        splits = measure_splits(modes, prompts, max_new_tokens=conf.new_tokens)
        costs = derive_costs(modes, splits)
        mode_results = {
            name: _build_mode_result(name, modes, prompts, results, tolerances, splits, costs)
            for name in modes
        }
        drafts = [
            _measure_draft(candidate, target, modes, mode_results, prompts, tree, tolerances, conf)
            for candidate in candidates
        ]
    for mode in mode_results.values():
        mode.graphs_after_warmup = graph_budget and graph_budget.compiled_late
    return build_report(
        _describe_setup(target, prompts, tree, conf, graph_budget),
        autoregressive=mode_results[AUTOREGRESSIVE_MODE],
        ngram=mode_results["ngram"],
        drafts=drafts,
    )


def plan_evaluation(
    target: Target, candidates: list[DraftUnderTest], tree: Tree, conf: EvaluationConf
) -> tuple[list[EvalPrompt], set[Graph]]:
    """Load the prompts of an evaluation, and list the graphs that it will need."""
    check_tree_depth(candidates, tree)
    conf.acceptance_rule.check(conf.sampling, tree)
    prompts = _load_all_turns(target, conf)
    needed_graphs = graph_plan.plan_eval_graphs(
        [graph_plan.DraftSpec.from_draft(c.draft, c.target) for c in candidates],
        tree=tree,
        prompt_lengths=[len(prompt.ids) for prompt in prompts],
        conf=conf,
        lazy=target.device.lazy,
    )
    return prompts, needed_graphs


def _load_all_turns(target: Target, conf: EvaluationConf) -> list[EvalPrompt]:
    """Load the prompts, followed by later turns, which continue the target's own answers."""
    turn = prompts = load_eval_prompts(target.tokenizer, conf.prompts, limit=conf.limit)
    for _ in range(1, conf.turns):
        unfinished = [prompt for prompt in turn if prompt.remaining_turns]
        answers = generate_answers(
            target.eager(),  # graphs are announced only once the prompts are known
            [prompt.ids for prompt in unfinished], max_new_tokens=conf.new_tokens,
            sampling=conf.sampling, row_ids=[prompt.row_id for prompt in unfinished],
        )  # fmt: skip
        turn = build_next_turns(target.tokenizer, unfinished, [ids for _, ids in sorted(answers)])
        prompts = prompts + turn
    return prompts


def _build_mode_result(
    name: str,
    modes: dict[str, EvalMode],
    prompts: list[EvalPrompt],
    results: dict[str, list[PromptResult]],
    tolerances: dict[str, LogitTolerance],
    splits: dict[str, RoundSplit],
    costs: dict[str, RoundCosts],
) -> ModeResult:
    mode = modes[name]
    exactness = Exactness()  # ratio tests draw other answers: there is nothing to compare
    if mode.is_comparable:
        exactness = compare_answers(
            modes[mode.baseline].decoder, prompts, results[mode.baseline], results[name],
            tolerances[mode.baseline],
        )  # fmt: skip
    bottleneck = None
    tau = estimate_metric("acceptance_length", results[name], results[mode.baseline])
    if name in costs and tau is not None:
        bottleneck = describe_bottleneck(splits[name], splits[mode.baseline], tau.mean)
    return ModeResult(
        prompt_results=results[name],
        exactness=exactness,
        verification=mode.decoder.policy.acceptance_rule.name,
        costs=costs.get(name),
        draft_passes=mode.draft_passes,
        split=splits.get(name),
        bottleneck=bottleneck,
    )


def _measure_draft(
    candidate: DraftUnderTest,
    target: Target,
    modes: dict[str, EvalMode],
    mode_results: dict[str, ModeResult],
    prompts: list[EvalPrompt],
    tree: Tree,
    tolerances: dict[str, LogitTolerance],
    conf: EvaluationConf,
) -> DraftResult:
    verifier = candidate.target or target
    baseline = Baseline(
        decoder=modes[candidate.baseline].decoder,
        prompt_results=mode_results[candidate.baseline].prompt_results,
        tolerance=tolerances[candidate.baseline],
    )  # fmt: skip
    return DraftResult(
        name=candidate.name,
        method=candidate.draft.method,
        num_parameters=sum(p.numel() for p in candidate.draft.parameters()),
        memory=_measure_memory(candidate.draft, modes[f"{candidate.name}/tree"].decoder),
        untrained=mode_results.get(f"{candidate.name}/untrained")
        or NotMeasured(reason=str(candidate.untrained)),
        chain=mode_results[f"{candidate.name}/chain"],
        tree=mode_results[f"{candidate.name}/tree"],
        target=_build_adapted_target(candidate, target, mode_results),
        contamination=_find_contamination(candidate, prompts),
        batch_results=measure_batch_sizes(verifier, candidate, tree, prompts, conf, baseline),
        replay_result=_replay_draft(verifier, candidate, prompts, tree, conf),
        longest_row=candidate.directory and read_longest_row(candidate.directory),
        samples=collect_samples(
            verifier, prompts, mode_results[f"{candidate.name}/tree"].prompt_results, mode="tree"
        ),
    )


def _find_contamination(
    candidate: DraftUnderTest, prompts: list[EvalPrompt]
) -> Contamination | None:
    return candidate.directory and check_contamination(prompts, candidate.directory)


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
    replay = Replay(
        target, candidate.draft, texts, sampling=conf.sampling, verification=conf.verification
    )
    accepted = replay.accepted_lengths({"tree": tree})["tree"]
    tau, all_positions = (
        bootstrap_t(count(accepted)) for count in (count_on_policy, count_all_positions)
    )
    if tau is None or all_positions is None:
        return None
    return ReplayResult(tau=tau, all_positions=all_positions)


def choose_warmup_prompts(prompts: list[EvalPrompt]) -> list[EvalPrompt]:
    """Choose one prompt of each padded length and one of each category to warm up with."""
    warmup_prompts = list({bucket_length(len(p.ids)): p for p in prompts}.values())
    return warmup_prompts + list({p.category: p for p in prompts}.values())


def _warm_up_modes(
    modes: dict[str, EvalMode], prompts: list[EvalPrompt], conf: EvaluationConf
) -> dict[str, LogitTolerance]:
    """Decode the warm-up prompts in every mode, so that all graphs are compiled.

    Return the logit tolerance of each autoregressive mode, measured on the same prompts.
    """
    warmup_prompts = choose_warmup_prompts(prompts)
    tolerances: dict[str, LogitTolerance] = {}
    for name, mode in track(modes.items(), "warming up", disable=not sys.stderr.isatty()):
        if name == mode.baseline:
            tolerances[name] = measure_tolerance(
                mode.decoder, warmup_prompts, max_new_tokens=conf.new_tokens
            )
            continue
        for prompt in warmup_prompts:
            mode.decoder.decode(
                [prompt.ids], row_ids=[prompt.row_id], max_new_tokens=conf.new_tokens
            )
    return tolerances


def _decode_all_modes(
    modes: dict[str, EvalMode], prompts: list[EvalPrompt], conf: EvaluationConf
) -> dict[str, list[PromptResult]]:
    """Decode each prompt in every mode, in alternating order, before the next prompt."""
    results: dict[str, list[PromptResult]] = {name: [] for name in modes}
    quiet = not sys.stderr.isatty()
    for number, prompt in enumerate(track(prompts, "held-out prompts", disable=quiet)):
        for name in alternate_order(list(modes), number):
            decoder = modes[name].decoder
            (generation,) = decoder.decode(
                [prompt.ids], row_ids=[prompt.row_id],
                max_new_tokens=conf.new_tokens, eos_ids=decoder.target.eos_ids,
            )  # fmt: skip
            results[name].append(
                PromptResult.from_generation(prompt, generation, depth=decoder.depth)
            )
    return results


def _measure_memory(draft: Draft, decoder: Decoder) -> DraftMemory:
    return DraftMemory(weights=_model_bytes(draft), state=tensor_bytes(decoder.state))


def _model_bytes(model: torch.nn.Module) -> int:
    return tensor_bytes([*model.parameters(), *model.buffers()])


def tensor_bytes(state: Any) -> int:
    """Return the bytes of all tensors in nested dictionaries, lists and caches.

    >>> tensor_bytes({"lengths": torch.zeros(2, dtype=torch.int64), "keys": [torch.zeros(3)]})
    28
    """
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, StaticCache):
        state = state.keys + state.values
    items = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return sum(map(tensor_bytes, items))


def _build_adapted_target(
    candidate: DraftUnderTest, original: Target, mode_results: dict[str, ModeResult]
) -> AdaptedTarget | None:
    return candidate.target and AdaptedTarget(
        name=candidate.target.name,
        num_parameters=candidate.target.num_parameters,
        adapted_from=original.name,
        autoregressive=mode_results[candidate.baseline],
        weight_bytes=_model_bytes(candidate.target.model),
    )


def _describe_setup(
    target: Target, prompts: list[EvalPrompt], tree: Tree, conf: EvaluationConf,
    graph_budget: GraphBudget | None,
) -> EvalSetup:  # fmt: skip
    return EvalSetup(
        command=" ".join(["python", "-m", *sys.orig_argv[2:]][:20]),
        versions={
            "python": sys.version.split()[0],
            **{name: version(name) for name in ("torch", "transformers")},
        },
        device=target.device.describe(),
        target=target.name,
        target_parameters=target.num_parameters,
        prompts_sha256=fingerprint_prompts(prompts),
        prompts_source=describe_origin(prompts, conf.prompts),
        num_templated_prompts=sum(prompt.chat_template for prompt in prompts),
        max_new_tokens=conf.new_tokens,
        sampling=asdict(conf.sampling),
        tree=tree.describe(),
        target_weight_bytes=_model_bytes(target.model),
        graphs=graph_budget and graph_budget.counts(),
    )

"""Evaluate drafts: decode every held-out prompt in every mode (infer/measure/bench.py), and build the report."""

import datetime
import itertools
import shlex
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version

from data.eval_prompts.contamination import check_contamination
from data.eval_prompts.held_out_files import read_longest_row
from data.eval_prompts.prompts import EvalPrompt, build_next_turns, load_eval_prompts
from infer.config import EvaluationConf
from infer.engine.answers import generate_answers
from infer.engine.graph_plan import list_graphs
from infer.engine.row_tensors import tensor_bytes
from infer.measure.batched import build_decoders, measure_batch_size, warm_up_decoders
from infer.measure.bench import WARMUP_TOKENS, bind_decoders, choose_warmup_prompts, decode_in_turns, decode_prompts
from infer.measure.context_limits import check_context
from infer.measure.eval_modes import (
    DraftUnderTest,
    EvalMode,
    build_eval_modes,
    build_evaluation_rule,
    check_tree_depth,
    warn_tree_depth,
)
from infer.measure.exactness import compare_answers, measure_tolerance
from infer.measure.timing import measure_splits, warm_up_unfused
from infer.results.curve import read_curve
from infer.results.records import AUTOREGRESSIVE, Exactness, LogitTolerance, ModeResult, PromptResult
from infer.results.report import build_report, describe_prompts
from infer.results.samples import collect_samples
from infer.results.schema import (
    AdaptedTarget,
    DeviceInfo,
    DraftInfo,
    DraftMemory,
    EvalReport,
    EvalSetup,
    TargetInfo,
    TreeInfo,
)
from models.device.graph_budget import Graph, GraphBudget
from models.io.console import print_line, track_progress
from models.targets.target import Target
from models.trees.config import TreeConf
from models.trees.tree import Tree

CheckAnswers = Callable[[str, list[PromptResult]], Exactness]  # of a mode by its name


def evaluate_drafts(
    target: Target, candidates: list[DraftUnderTest], *, tree: TreeConf, conf: EvaluationConf
) -> EvalReport:
    """Evaluate the drafts in all modes; raise UserError before decoding if settings conflict."""
    with target.cpu_threads():
        return _run_evaluation(target, candidates, tree.build(), conf)


def _run_evaluation(target: Target, candidates: list[DraftUnderTest], tree: Tree, conf: EvaluationConf) -> EvalReport:
    prompts, modes, needed_graphs = plan_evaluation(target, candidates, tree, conf)
    for candidate in candidates:
        warn_tree_depth(tree, candidate.draft, candidate.name)
    with target.device.expect_graphs(needed_graphs, print_line) as graph_budget:
        with target.device.ledger.warming():
            tolerances = warm_up_modes(modes, prompts, conf)
        decoders = {name: mode.decoder for name, mode in modes.items()}
        answer_in_modes = bind_decoders(decoders, max_new_tokens=conf.new_tokens)
        answers = decode_in_turns(answer_in_modes, [[prompt] for prompt in prompts], "held-out prompts")

        def check_answers(name: str, decoded: list[PromptResult]) -> Exactness:
            """Compare answers with the mode's baseline, except those of ratio tests, which draw different ones."""
            mode, base = modes[name], modes[name].baseline
            if mode.decoder.program.acceptance_rule.verification.is_ratio_test:
                return Exactness()
            return compare_answers(modes[base].decoder, answers[base], decoded, tolerances[base])

        splits = measure_splits(modes, prompts, max_new_tokens=conf.new_tokens) if conf.phases else {}
        results = {
            name: ModeResult(
                prompt_results=answers[name],
                baseline=mode.baseline,
                depth=mode.decoder.tree.max_path_length,
                verification=mode.decoder.program.acceptance_rule.name,
                exactness=check_answers(name, answers[name]),
                split=splits.get(name),
                draft_passes=draft and draft.passes(mode.decoder.tree.depth),
            )
            for name, mode in modes.items()
            for draft in [mode.decoder.draft]
        }
        drafts = [
            _measure_draft(candidate, target, modes, results, prompts, tree, check_answers, conf)
            for candidate in candidates
        ]
    setup = _describe_setup(target, candidates, prompts, tree, conf, graph_budget)
    return build_report(setup, results, drafts)


def _describe_setup(
    target: Target,
    candidates: list[DraftUnderTest],
    prompts: list[EvalPrompt],
    tree: Tree,
    conf: EvaluationConf,
    graph_budget: GraphBudget | None,
) -> EvalSetup:
    return EvalSetup(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=shlex.join(
            ["python", *sys.orig_argv[sys.orig_argv.index("-m") :]] if "-m" in sys.orig_argv else sys.argv
        ),
        versions={"python": sys.version.split()[0], **{name: version(name) for name in ("torch", "transformers")}},
        device=DeviceInfo(**target.device.describe()),
        graphs=graph_budget and graph_budget.counts(),
        graphs_after_warmup=graph_budget and graph_budget.compiled_late,
        target=TargetInfo(name=target.name, parameters=target.num_parameters, processes=target.processes),
        sampling=conf.sampling,
        tree=TreeInfo(kind=tree.kind.value, depth=tree.depth, nodes=tree.nodes, copied=tree.ngram_tokens),
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
    """Return the prompts, modes and graphs of an evaluation; raise UserError if drafts, tree and rule do not fit."""
    check_tree_depth(candidates, tree)
    build_evaluation_rule(conf).check(conf.sampling, tree)
    prompts = _load_all_turns(target, conf)
    modes = build_eval_modes(target, candidates, tree, prompts, conf)
    decoders = [(mode.decoder, mode.timed and conf.phases) for mode in modes.values()]
    for candidate, batch in itertools.product(candidates, conf.batch_sizes):
        batched = build_decoders(target, candidate, tree, prompts, conf, batch)
        decoders += [(decoder, False) for decoder in batched.values()]
    lengths = [len(prompt.ids) for prompt in prompts]
    listed = (list_graphs(decoder.session, lengths, in_parts=in_parts) for decoder, in_parts in decoders)
    return prompts, modes, {*itertools.chain.from_iterable(listed)}


def compile_eval_graphs(target: Target, drafts: list[DraftUnderTest], *, tree: TreeConf, conf: EvaluationConf) -> None:
    """Compile the graphs of an evaluation by calling every function once in each of its shapes."""
    if not target.device.has_static_shapes:
        print_line("graphs: none to compile, because compiling is off on this device")
        return
    shape = tree.build()
    with target.cpu_threads():
        prompts, modes, graphs = plan_evaluation(target, drafts, shape, conf)
        with target.device.expect_graphs(graphs, print_line):
            warm_up_modes(modes, prompts, conf)
            timed = [mode for mode in modes.values() if mode.timed and conf.phases]
            warm_up_unfused(timed, prompts[0], max_new_tokens=conf.new_tokens)
            for draft, batch in itertools.product(drafts, conf.batch_sizes):
                decoders = build_decoders(target, draft, shape, prompts, conf, batch)
                warm_up_decoders(decoders.values(), prompts, conf)


def _load_all_turns(target: Target, conf: EvaluationConf) -> list[EvalPrompt]:
    """Load the prompts, followed by later turns, which continue the target's own answers."""
    turn_prompts = prompts = load_eval_prompts(
        target.tokenizer, conf.prompts, limit=conf.prompts_per_category, template=conf.template
    )
    for _ in range(1, conf.turns):
        unfinished = [prompt for prompt in turn_prompts if prompt.remaining_turns]
        answers = generate_answers(
            target.eager(),  # graphs are announced only once the prompts are known
            [prompt.ids for prompt in unfinished],
            max_new_tokens=conf.new_tokens,
            sampling=conf.sampling,
            row_ids=[prompt.row_id for prompt in unfinished],
        )
        texts = [ids for _, ids in sorted(answers)]
        turn_prompts = build_next_turns(target.tokenizer, unfinished, texts, target.eos_ids)
        check_context(
            getattr(target.config, "max_position_embeddings", None),
            max((len(p.ids) for p in turn_prompts), default=0) + conf.new_tokens,
        )
        prompts = prompts + turn_prompts
    return prompts


def _measure_draft(
    candidate: DraftUnderTest,
    target: Target,
    modes: dict[str, EvalMode],
    results: dict[str, ModeResult],
    prompts: list[EvalPrompt],
    tree: Tree,
    check_answers: CheckAnswers,
    conf: EvaluationConf,
) -> DraftInfo:
    """Describe a draft, and measure what is no mode: its batches."""
    adapted, directory, draft = candidate.adapted_target, candidate.directory, candidate.draft
    verifier, tree_mode = adapted or target, f"{candidate.name}/tree"
    weights = tensor_bytes([*draft.parameters(), *draft.buffers()])
    state = tensor_bytes(modes[tree_mode].decoder.session.buffers[1])
    pairs = zip(results[candidate.baseline].prompt_results, results[AUTOREGRESSIVE].prompt_results, strict=True)
    changed = sum(ours.generation.ids != originals.generation.ids for ours, originals in pairs)
    return DraftInfo(
        name=candidate.name,
        method=draft.method,
        parameters=sum(p.numel() for p in draft.parameters()),
        memory_bytes=DraftMemory(weights=weights, state=state),
        target=adapted and AdaptedTarget(name=adapted.name, parameters=adapted.num_parameters, changed_answers=changed),
        tuned_tree=candidate.tuned and candidate.tuned.description,
        not_measured={"untrained": candidate.untrained} if isinstance(candidate.untrained, str) else {},
        longest_row=directory and read_longest_row(directory),
        training=read_curve(directory) if directory else [],
        batches=[
            measure_batch_size(target, candidate, tree, prompts, conf, batch, partial(check_answers, tree_mode))
            for batch in sorted(conf.batch_sizes)
        ],
        samples=collect_samples(verifier.tokenizer, results[tree_mode].prompt_results),
    )


def warm_up_modes(
    modes: dict[str, EvalMode], prompts: list[EvalPrompt], conf: EvaluationConf
) -> dict[str, LogitTolerance]:
    """Decode the warm-up prompts in every mode, so that all graphs are compiled.

    Return the logit tolerance of each autoregressive mode, measured on the same prompts.
    """
    warmup_prompts = choose_warmup_prompts(prompts)
    tolerances: dict[str, LogitTolerance] = {}
    for name, mode in track_progress(modes.items(), "warming up", total=len(modes)):
        if name == mode.baseline:
            tolerances[name] = measure_tolerance(mode.decoder, warmup_prompts, max_new_tokens=conf.new_tokens)
            continue
        for prompt in warmup_prompts:
            decode_prompts(
                mode.decoder, [prompt], max_new_tokens=min(WARMUP_TOKENS, conf.new_tokens), stops_at_eos=False
            )
    return tolerances

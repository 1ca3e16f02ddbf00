"""Tune the drafts of a report before it is measured: `tune=true` of `train` and `infer.eval`.

The search is that of `infer.tune`, at batch size 1 and bounded. Beside its own best it decodes with the modes of the
report, so that `tuned` is not slower than any of them beyond noise, as far as other prompts tell.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from conf.typed_text import format_overrides
from data.eval_prompts.held_out_files import SELECTION_FILE, find_held_out_file
from data.eval_prompts.prompts import EvalPrompt, load_calibration_prompts, load_eval_prompts, spread_prompts
from infer.config import EvaluationConf
from infer.measure.eval_modes import DraftUnderTest, TunedDecoding, lookup_depth
from infer.tuning.candidates import USER_TREE, TreeCandidate
from infer.tuning.config import TuneConf
from infer.tuning.cost_model import COMPILER_ERRORS, CostBench, RoundSeconds, read_clock
from infer.tuning.results import DraftTuning
from infer.tuning.search import choose_tree, estimate_candidates
from infer.verify.config import Verification
from models.device.memory_watch import report_out_of_memory
from models.drafts.base import Draft
from models.io.console import IS_MAIN_PROCESS, print_line
from models.io.errors import UserError, first_line, require
from models.targets.config import TargetConf
from models.targets.target import Target
from models.trees.config import TUNED, TreeConf
from models.trees.tree import NO_TREE

MAX_PROMPTS, MAX_NEW_TOKENS = 16, 64
MAX_DEPTH = 8  # of windows and trees, unless the user's tree is deeper
NODE_BUDGETS = [8, 16, 32]
NGRAM_TOKENS = 8  # beside a tree, unless the user's tree has another number
NGRAM_WINDOWS = (4, 8, 16)
MAX_MINUTES = 10.0  # of each draft, until no more shapes are tried; infer.tune takes the time that it needs

REPLAYED_RULES = (Verification.greedy, Verification.coupled)  # their answers do not depend on the draft


def tune_drafts_for_report(
    target: Target,
    drafts: list[DraftUnderTest],
    *,
    tree: TreeConf,
    conf: EvaluationConf,
    target_conf: TargetConf,
    run: Path,
    round_seconds: RoundSeconds = read_clock,
) -> list[DraftUnderTest]:
    """Return the drafts with the decoding that the tuner chooses for each, and write its tree to the folder `run`.

    If they cannot be tuned, print a line on the reason and return them as they are: a finished
    training run must still be measured.
    """
    directories, is_checked = [draft.directory for draft in drafts if draft.directory], False
    try:
        check_tunable(target, conf)
        prompts = choose_prompts(target, directories, target_conf, conf)
        is_checked = True
        print_line(
            f"tune: timing trees on {len(prompts)} of the prompts that the report does not use"
            + (f", {MAX_MINUTES:g} minutes at most" if target.device.compiles else "")
        )
        with report_out_of_memory("memory: too little for all trees"), target.cpu_threads():
            return [_tune_draft(target, draft, prompts, tree, conf, run, round_seconds) for draft in drafts]
    except (UserError, *COMPILER_ERRORS) as error:
        if is_checked and target.processes > 1:
            raise  # the other processes would go on tuning
        reason = f"{'' if isinstance(error, UserError) else f'{type(error).__name__}: '}{first_line(error)}"
        command = f"python -m infer.tune {format_overrides({'checkpoint': [*map(str, directories)]})}"
        remedy = f" To tune apart from it: {command}" if conf.rule in REPLAYED_RULES else ""
        print_line(f"tune: not tuned, the report has no mode `tuned`. {reason}.{remedy}", markup=False)
        return drafts


def check_tunable(target: Target, conf: EvaluationConf) -> None:
    """Raise UserError if trees cannot be tuned with this target, device and acceptance rule."""
    require(
        conf.rule in REPLAYED_RULES,
        "evaluation.verification: must be greedy or coupled for tune=true, whose replay needs "
        f"answers that do not depend on the draft, got {conf.rule.value}",
    )
    require(
        not target.gathers_weights,
        "parallel.target: must be replicated for tune=true, because no server gathers a target's weights for each "
        "pass, got sharded",
    )
    require(
        not target.device.compiles_slowly,
        f"device: must compile a shape in seconds for tune=true, which tries some twenty, got {target.device.name}",
    )


def choose_prompts(
    target: Target, directories: Sequence[Path], target_conf: TargetConf, conf: EvaluationConf
) -> list[EvalPrompt]:
    """Return up to MAX_PROMPTS of the prompts of `infer.tune`, of all categories.

    None of them is in the report. Raise UserError if there are none.
    """
    path = find_held_out_file(directories, target_conf, SELECTION_FILE, key="prompts")
    judged = load_eval_prompts(target.tokenizer, conf.prompts, limit=None, template=conf.template)
    judged_ids = {tuple(prompt.ids) for prompt in judged}
    prompts = [
        prompt for prompt in load_calibration_prompts(target.tokenizer, path) if tuple(prompt.ids) not in judged_ids
    ]
    require(bool(prompts), f"prompts: must not all be in the report, got those of {path}")
    return spread_prompts(prompts, MAX_PROMPTS)


def _tune_draft(
    target: Target,
    draft: DraftUnderTest,
    prompts: list[EvalPrompt],
    tree: TreeConf,
    conf: EvaluationConf,
    run: Path,
    round_seconds: RoundSeconds,
) -> DraftUnderTest:
    """Return a draft with its tuned decoding; print the choice, the seconds it took, and how to generate with it."""
    start = time.monotonic()
    tune_conf = build_tune_conf(tree, draft.draft, conf)
    verifier = draft.adapted_target or target
    tuning = estimate_candidates(verifier, draft.name, draft.directory or Path(), draft.draft, prompts, tune_conf)
    bench = CostBench(
        target=verifier,
        draft=draft.draft,
        prompts=prompts,
        conf=tune_conf,
        batch=1,
        context=max(len(prompt.ids) for prompt in prompts) + tune_conf.max_new_tokens,
        round_seconds=round_seconds,
        start=start,
        minutes=MAX_MINUTES,
    )
    result = choose_tree(bench, tuning, list_rivals(tuning, tree))
    best = result.best
    print_line(
        f"tune: {draft.name}: {'' if result.choice else 'no speculation; the best was '}{best.description}, speed-up "
        f"{result.format_speedup(best)} on {result.num_prompts} of these prompts; took {time.monotonic() - start:.0f} s"
    )
    if IS_MAIN_PROCESS:
        tuning.tree_path(run, TUNED).unlink(missing_ok=True)  # of an earlier choice
    if result.choice is None:
        return replace(draft, tuned=TunedDecoding(description="no speculation", draft=None, tree=NO_TREE))
    if IS_MAIN_PROCESS:
        file = tuning.write_tree(run, TUNED, best, {"measured_on": result.num_prompts})
        sampled = {f"sampling.{name}": value for name, value in conf.sampling.changes.items()}
        overrides = format_overrides({"checkpoint": draft.directory, "tree.file": file} | sampled)
        print_line(f'to answer with it: python -m infer.generate {overrides} prompt="..."')
    tuned = TunedDecoding(description=best.description, draft=best.choose_draft(draft.draft), tree=best.tree)
    return replace(draft, tuned=tuned)


def build_tune_conf(tree: TreeConf, draft: Draft, conf: EvaluationConf) -> TuneConf:
    """Return the settings of a bounded search, which includes the user's tree as it is."""
    shape = tree.build()
    depth = max(shape.depth, min(draft.trained_depth, MAX_DEPTH))
    return TuneConf(
        tree=tree,
        sampling=conf.sampling,
        batch=[1],
        depth=min(depth, draft.max_depth),
        nodes=NODE_BUDGETS,
        ngram_tokens=shape.ngram_tokens or NGRAM_TOKENS,
        ngram_windows=sorted({lookup_depth(shape), *NGRAM_WINDOWS}),
        max_new_tokens=min(MAX_NEW_TOKENS, conf.new_tokens),
    )


def list_rivals(tuning: DraftTuning, tree: TreeConf) -> list[TreeCandidate]:
    """Return the candidates that the report measures too, and every window of lookup alone."""
    shape = tree.build()
    user_tree = f"{USER_TREE}+{shape.ngram_tokens}" if shape.ngram_tokens else USER_TREE
    names = (f"chain-{shape.depth}", user_tree)
    return [c for c in tuning.candidates if c.is_lookup or c.name in names]

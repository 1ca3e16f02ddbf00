"""Build reports of invented prompts: on a single draft, and on three that must not be compared as they stand."""

import io
import json
from dataclasses import asdict, replace

import numpy as np
from pydantic import TypeAdapter
from rich.console import Console

from data.eval_prompts.contamination import Contamination
from data.eval_prompts.prompts import EvalPrompt
from infer.engine.requests import Generation
from infer.report.tables import print_report
from infer.results.intervals import Estimate
from infer.results.records import Exactness, LogitTolerance, ModeResult, PromptResult
from infer.results.report import build_report, describe_prompts
from infer.results.schema import (
    AdaptedTarget,
    BatchFigures,
    CurvePoint,
    DeviceInfo,
    DraftInfo,
    DraftMemory,
    EvalReport,
    EvalSetup,
    Mismatch,
    Mode,
    Report,
    RoundSplit,
    SampleAnswer,
    TargetInfo,
    TextSpan,
    TreeInfo,
)
from models.trees.sampling_config import SamplingConf

CATEGORIES = ("code", "docs", "structured", "open_ended")
COMPARED = ("usual", "runs/adapted", "a-run-with-a-long-name")
READER = TypeAdapter(Report)
NEAR = LogitTolerance(near_tie_gap=0.03, explained_gap=0.2, exact_arithmetic=False)
FIGURE = Estimate(mean=2.0, ci95=[1.5, 2.5])
PIECES = {
    "prompt": "def first(x):\n    # <b>of</b> a list\n    ",
    "target": "return",
    "accepted": ' x[0] if x & y else "\n\n    ',
}
CONTAMINATED = Contamination(checked=True, count=1, ids=["docs-2"])
UNCHECKED = Contamination(checked=False, reason="the run left no readable training_prompts.npy")


def prompt_result(*, prompt=None, **kwargs):
    """Build the answer to a prompt; `prompt` holds the fields of the prompt that matter."""
    prompt = EvalPrompt(**{"id": "a", "category": "code", "ids": [0]} | (prompt or {}))
    kwargs.setdefault("share_s", kwargs.get("round_s", []))
    return PromptResult(prompt=prompt, generation=Generation(**kwargs))


def draw_answers(*, share, depth, nodes, round_s, seed, per_category=12, rendered=0):
    """Build answers of 64 tokens in four categories; the accepted tokens of their rounds are geometrically distributed.

    The first `rendered` prompts count as rendered by a chat template.
    """
    rng = np.random.default_rng(seed)
    results = []
    for ease, category in enumerate(CATEGORIES):
        for number in range(per_category):
            accepted, tokens = [], 1
            while tokens < 64:
                easy = min(0.95, share * (0.8 + 0.1 * ease)) if share else 0
                accepted.append(int(min(depth, rng.geometric(1 - easy) - 1)) if depth else 0)
                tokens += accepted[-1] + 1
            results.append(
                prompt_result(
                    prompt={
                        "id": f"{category}-{number}",
                        "category": category,
                        "ids": [0] * (100 * (number + 1)),
                        "chat_template": len(results) < rendered,
                    },
                    ids=[int(token) for token in rng.integers(0, 99, 64)],
                    accepted=accepted,
                    drafted=[nodes] * len(accepted),
                    prefill_s=float(rng.uniform(0.01, 0.02)),
                    round_s=[float(x) for x in rng.uniform(0.8, 1.2, len(accepted)) * round_s],
                )
            )
    return results


def measured(*, baseline="autoregressive", **kwargs):
    """Build a mode whose rounds take 2 ms to draft, 0.3 for the cache, 0.4 to accept and 0.2 on the host."""
    depth, round_ms = kwargs["depth"], 1000 * kwargs["round_s"]
    draft_ms = 2.0 if depth else 0.0
    cache_move = 0.3 if depth else 0.0
    split = RoundSplit(
        draft=draft_ms,
        verify=round_ms - draft_ms - cache_move - 0.4,
        accept=0.4,
        cache_move=cache_move,
        host=0.2,
        round=round_ms + 0.2,
        fused_round=round_ms - 1,
    )
    return ModeResult(
        prompt_results=draw_answers(**kwargs), baseline=baseline, depth=depth, split=split, draft_passes=depth or None
    )


def measured_draft(name, seed, **more):
    """Build the modes of a draft that accepts most with a tree, by key."""
    modes = {
        "untrained": measured(share=0.02, depth=6, nodes=20, round_s=0.015, seed=seed, **more),
        "chain": measured(share=0.7, depth=5, nodes=5, round_s=0.013, seed=seed + 1, **more),
        "tree": measured(share=0.75, depth=6, nodes=20, round_s=0.015, seed=seed + 2, **more),
    }
    near = Mismatch(prompt_id="code-3", position=17, logit_gap=0.002)
    modes["tree"] = replace(modes["tree"], exactness=Exactness(mismatches=[near], tolerance=NEAR))
    return {f"{name}/{mode}": result for mode, result in modes.items()}


def measured_target(**more):
    """Build the modes of the target alone, by key."""
    plain = measured(share=0.0, depth=0, nodes=0, round_s=0.01, seed=1, **more)
    ngram = measured(share=0.3, depth=5, nodes=5, round_s=0.012, seed=2, **more)
    return {"autoregressive": plain, "ngram": replace(ngram, draft_passes=0)}


def build_batch_figures(size, speedup):
    return BatchFigures(
        size=size,
        speedup=Estimate(mean=speedup, ci95=[speedup - 0.2, speedup + 0.3]),
        tokens_per_s=Estimate(mean=1234.5, ci95=None),
        autoregressive_tokens_per_s=FIGURE,
        acceptance_length=FIGURE,
        verdict=Exactness().judge("greedy"),
    )


def curve(points=10, *, rise=0.1, noise=0.01):
    """Build a training curve: tau grows by `rise` every 100,000 tokens, and is off by plus or minus `noise` in turn."""
    return [CurvePoint(tokens=100_000 * n, tau=2.0 + rise * n + noise * (-1) ** n) for n in range(1, points + 1)]


def described(name, **changes):
    """Build the entry of a draft, with every figure outside its modes."""
    pieces = [TextSpan(text=text, kind=kind) for kind, text in PIECES.items()]
    fields = {
        "method": "eagle3",
        "parameters": 456_789,
        "memory_bytes": DraftMemory(weights=1_827_156, state=65_536),
        "target": None,
        "tuned_tree": None,
        "not_measured": {},
        "longest_row": 512,
        "training": curve(),
        "batches": [build_batch_figures(4, 2.0), build_batch_figures(16, 1.25)],
        "samples": [SampleAnswer(prompt_id="code-3", pieces=pieces)],
    }
    return DraftInfo(name=name, **fields | changes)


def build_sample_report(results, drafts=(), *, contamination=None, source=None) -> EvalReport:
    """Build a report of these modes for a demo target on two threads; `source` names the prompts' origin."""
    prompts = [replace(result.prompt, held_out_of=source or "") for result in results["autoregressive"].prompt_results]
    setup = EvalSetup(
        created="2026-11-23T00:00:00+00:00",
        command="python -m infer.eval",
        versions={"torch": "2.13.0", "transformers": "5.23.0"},
        device=DeviceInfo(name="cpu", kind="x86_64", dtype="float32", threads=2, compiled=True),
        graphs=None,
        graphs_after_warmup=0,
        target=TargetInfo(name="demo", parameters=3_456_789),
        sampling=SamplingConf(),
        tree=TreeInfo(kind="dynamic", depth=4, nodes=12, copied=0),
        prompts=describe_prompts(prompts, source, max_new_tokens=64, contamination=contamination or {}),
    )
    return build_report(setup, results, list(drafts))


def build_draft_report():
    """Build a report on a single draft whose tree mode differs from the target at a near tie."""
    return build_sample_report(
        measured_target() | measured_draft("eagle3-demo", 3),
        [described("eagle3-demo")],
        contamination={"eagle3-demo": CONTAMINATED},
    )


def build_comparison_report():
    """Build a report on three drafts: usual, with an adapted target, verified by a lossy rule."""
    usual, adapted, lossy = COMPARED
    own = measured(share=0.0, depth=0, nodes=0, round_s=0.008, seed=1)
    lossy_modes = {
        key: replace(mode, verification="typical", exactness=Exactness())
        for key, mode in measured_draft(lossy, 5).items()
    }
    target = AdaptedTarget(name="demo adapted", parameters=3_500_000, changed_answers=5)
    baseline = f"{adapted}/autoregressive"
    return build_sample_report(
        measured_target()
        | measured_draft(usual, 3)
        | {baseline: replace(own, baseline=baseline)}
        | measured_draft(adapted, 4, baseline=baseline)
        | lossy_modes,
        [described(usual), described(adapted, target=target), described(lossy)],
        contamination=dict(zip(COMPARED, [CONTAMINATED, CONTAMINATED, UNCHECKED], strict=True)),
    )


def with_mode(report, key, **changes) -> Report:
    """Return the report with changed figures or a changed verdict of a mode, on all prompts."""
    mode = report.overall.modes[key]
    figures = {name: value for name, value in changes.items() if hasattr(mode.figures, name)}
    verdict = {name: value for name, value in changes.items() if hasattr(mode.verdict, name)}
    changed = replace(mode, figures=replace(mode.figures, **figures), verdict=replace(mode.verdict, **verdict))
    return with_modes(report, report.overall.modes | {key: changed})


def with_modes(report, modes: dict[str, Mode]) -> Report:
    """Return the report with these modes on all prompts."""
    return replace(report, overall=replace(report.overall, modes=modes))


def as_json(report):
    """Return the content of report.json."""
    content = asdict(report)
    content.pop("rounds", None)
    return json.loads(json.dumps(content, allow_nan=False))


def from_json(content) -> Report:
    """Return the report that a file with this content holds."""
    return READER.validate_python(content)


def printed(report, **kwargs):
    """Return the text that a terminal shows."""
    file = io.StringIO()
    print_report(report, Console(file=file, **kwargs))
    return file.getvalue()

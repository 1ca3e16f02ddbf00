"""Reports of made-up prompts: one draft, and three that may not be compared as they stand."""

import io
import json
from dataclasses import asdict, replace

import numpy as np
from pydantic import TypeAdapter
from rich.console import Console

from data.eval_prompts.contamination import Contamination
from data.eval_prompts.prompts import EvalPrompt
from infer.engine.requests import Generation
from infer.measure.intervals import Estimate
from infer.measure.records import (
    AdaptedTarget,
    DraftResult,
    Exactness,
    LogitTolerance,
    ModeResult,
    PromptResult,
)
from infer.measure.report import build_report, describe_prompts
from infer.measure.report_schema import (
    SCHEMA_VERSION,
    BatchSection,
    CurvePoint,
    DeviceInfo,
    DraftMemory,
    EvalReport,
    EvalSetup,
    Mismatch,
    ReplayResult,
    Report,
    RoundCosts,
    RoundSplit,
    SampleAnswer,
    TargetInfo,
    TextSpan,
    TreeInfo,
)
from infer.report.tables import print_report
from models.speculate.config import SamplingConf

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


def prompt_result(*, depth, prompt=None, **kwargs):
    """An answer to a prompt; `prompt` holds the fields of the latter that matter."""
    prompt = EvalPrompt(**{"id": "a", "category": "code", "ids": [0]} | (prompt or {}))
    return PromptResult(prompt=prompt, generation=Generation(**kwargs), depth=depth)


def traces(*, share, depth, nodes, round_s, seed, per_category=12, rendered=0):
    """Prompts of four categories whose rounds accept geometrically, cut at 64 tokens.

    A chat template has rendered the first `rendered` of them.
    """
    rng = np.random.default_rng(seed)
    made = []
    for ease, category in enumerate(CATEGORIES):
        for number in range(per_category):
            accepted, tokens = [], 1
            while tokens < 64:
                easy = min(0.95, share * (0.8 + 0.1 * ease)) if share else 0
                accepted.append(int(min(depth, rng.geometric(1 - easy) - 1)) if depth else 0)
                tokens += accepted[-1] + 1
            made.append(
                prompt_result(
                    prompt={
                        "id": f"{category}-{number}",
                        "category": category,
                        "ids": [0] * (100 * (number + 1)),
                        "chat_template": len(made) < rendered,
                    },
                    ids=[int(token) for token in rng.integers(0, 99, 64)],
                    accepted=accepted,
                    drafted=[nodes] * len(accepted),
                    depth=depth,
                    prefill_s=float(rng.uniform(0.01, 0.02)),
                    round_s=[float(x) for x in rng.uniform(0.8, 1.2, len(accepted)) * round_s],
                )
            )
    return made


def measured(**kwargs):
    depth = kwargs["depth"]
    draft = 2.0 if depth else 0.0
    round_ms = 1000 * kwargs["round_s"]
    level = draft / depth if depth else None
    costs = RoundCosts(
        draft=draft, verify=round_ms - draft, autoregressive_step=10.0, level=level
    )  # fmt: skip
    return ModeResult(
        prompt_results=traces(**kwargs),
        costs=costs,
        graphs_after_warmup=0,
        draft_passes=depth,
        split=split(draft=draft, round_ms=round_ms),
    )


def split(*, draft, round_ms):
    """Of 0.3 ms for the cache, 0.4 ms to accept, 0.2 ms of the host; a fused round saves 1 ms."""
    return RoundSplit(
        draft=draft, verify=round_ms - draft - 0.9, accept=0.4, cache_move=0.3, host=0.2,
        round=round_ms, fused_round=round_ms - 1,
    )  # fmt: skip


def at_batch(draft, batch, speedup):
    return BatchSection(
        draft=draft, batch=batch, mode="tree",
        speedup=Estimate(mean=speedup, ci95=[speedup - 0.2, speedup + 0.3]),
        tokens_per_s=Estimate(mean=1234.5, ci95=None), autoregressive_tokens_per_s=FIGURE,
        acceptance_length=FIGURE, **vars(Exactness().judge("exact")),
    )  # fmt: skip


def curve(points=10, *, rise=0.1, noise=0.01):
    """Tau at each 100,000 tokens: `rise` more for each, and off by `noise` in turns."""
    return [
        CurvePoint(tokens=100_000 * n, tau=2.0 + rise * n + noise * (-1) ** n)
        for n in range(1, points + 1)
    ]


def draft_run(name, seed):
    tree = measured(share=0.75, depth=6, nodes=20, round_s=0.015, seed=seed + 2)
    tree.exactness = Exactness(
        mismatches=[Mismatch(prompt_id="code-3", position=17, logit_gap=0.002)],
        tolerance=NEAR,
    )
    tree.bottleneck = "Of 3.15 tokens a round, verifying takes 1.21 autoregressive steps."
    said = [TextSpan(text=text, kind=kind) for kind, text in PIECES.items()]
    return DraftResult(
        replay_result=ReplayResult(tau=FIGURE, all_positions=FIGURE),
        batches=[at_batch(name, 16, 1.25), at_batch(name, 4, 2.0)],
        samples=[SampleAnswer(draft=name, prompt_id="code-3", mode="tree", pieces=said)],
        name=name,
        method="eagle3",
        longest_row=512,
        curve=curve(),
        num_parameters=456_789,
        memory=DraftMemory(weights=1_827_156, state=65_536),
        modes={
            "untrained": measured(share=0.02, depth=6, nodes=20, round_s=0.015, seed=seed),
            "chain": measured(share=0.7, depth=5, nodes=5, round_s=0.013, seed=seed + 1),
            "tree": tree,
        },
    )


def made_report(autoregressive, ngram, drafts, *, contamination=None, source=None) -> EvalReport:
    """A report of these modes, of a demo target on two threads; `source` names the prompts."""
    prompts = [
        replace(result.prompt, held_out_of=source or "") for result in autoregressive.prompt_results
    ]
    setup = EvalSetup(
        schema_version=SCHEMA_VERSION,
        created="2026-11-23T00:00:00+00:00",
        command="python -m infer.eval",
        versions={"torch": "2.13.0", "transformers": "5.23.0"},
        device=DeviceInfo(name="cpu", kind="x86_64", dtype="float32", threads=2, compiled=True),
        target=TargetInfo(name="demo", parameters=3_456_789),
        sampling=SamplingConf(),
        tree=TreeInfo(kind="dynamic", depth=4, nodes=12, copied=0),
        prompts=describe_prompts(
            prompts, source, max_new_tokens=64, contamination=contamination or {}
        ),
    )
    return build_report(
        setup,
        autoregressive=autoregressive,
        ngram=ngram,
        drafts=drafts,
        target_bytes=18_271_560,
    )


def one_draft():
    """A report of one draft that is not quite exact, in bf16."""
    return made_report(
        measured(share=0.0, depth=0, nodes=0, round_s=0.01, seed=1),
        measured(share=0.3, depth=5, nodes=5, round_s=0.012, seed=2),
        [draft_run("eagle3-demo", 3)],
        contamination={"eagle3-demo": CONTAMINATED},
    )


def three_drafts():
    """Of three drafts: a usual one, one with a target of its own, one verified by a lossy rule."""
    usual, adapted, lossy = (draft_run(name, seed) for seed, name in enumerate(COMPARED, 3))
    own = measured(share=0.0, depth=0, nodes=0, round_s=0.008, seed=1)
    for trace in own.prompt_results[:5]:
        trace.generation.ids = [*trace.generation.ids[:-1], 0]
    adapted = replace(
        adapted,
        target=AdaptedTarget(
            name="demo adapted", parameters=3_500_000, adapted_from="demo", weight_bytes=None
        ),
        modes={"autoregressive": own} | adapted.modes,
    )
    for mode in lossy.modes.values():
        mode.verification, mode.exactness = "typical", Exactness()
    return made_report(
        measured(share=0.0, depth=0, nodes=0, round_s=0.01, seed=1),
        measured(share=0.3, depth=5, nodes=5, round_s=0.012, seed=2),
        [usual, adapted, lossy],
        contamination=dict(zip(COMPARED, [CONTAMINATED, CONTAMINATED, UNCHECKED], strict=True)),
    )


def as_json(report):
    """The content of report.json."""
    content = asdict(report)
    content.pop("rounds", None)
    return json.loads(json.dumps(content, allow_nan=False))


def from_json(content) -> Report:
    """The report of a file with this content."""
    return READER.validate_python(content)


def printed(report, **kwargs):
    """What a terminal shows."""
    file = io.StringIO()
    print_report(report, Console(file=file, **kwargs))
    return file.getvalue()

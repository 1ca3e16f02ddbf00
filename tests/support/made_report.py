"""Reports of made-up prompts: one draft, and three that may not be compared as they stand."""

import io

import numpy as np
from rich.console import Console

from data.eval_prompts.contamination import Contamination
from infer.measure.intervals import Estimate
from infer.measure.records import Exactness, LogitTolerance, Mismatch, PromptResult, RoundCosts
from infer.measure.report import build_report
from infer.measure.results import (
    AdaptedTarget,
    BatchResult,
    DraftMemory,
    DraftResult,
    EvalSetup,
    ModeResult,
    ReplayResult,
    RoundSplit,
    SampleAnswer,
    TextSpan,
)
from infer.report.tables import print_report

CATEGORIES = ("code", "docs", "structured", "open_ended")
COMPARED = ("usual", "runs/adapted", "a-run-with-a-long-name")
SETTING = EvalSetup(
    command="python -m infer.eval",
    versions={"torch": "2.13.0", "transformers": "5.23.0"},
    device={
        "name": "cpu",
        "kind": "x86_64",
        "dtype": "float32",
        "threads": 2,
        "compiled": True,
    },
    target="demo",
    target_parameters=3_456_789,
    prompts_sha256="0" * 64,
    max_new_tokens=64,
    sampling={"temperature": 0.0, "top_p": 1.0, "seed": 0},
    tree={"kind": "dynamic", "depth": 4, "nodes": 12, "copied": 0},
    target_weight_bytes=18_271_560,
)
NEAR = LogitTolerance(near_tie_gap=0.03, explained_gap=0.2, exact_arithmetic=False)
FIGURE = Estimate(mean=2.0, ci95=[1.5, 2.5])
PIECES = {
    "prompt": "def first(x):\n    # <b>of</b> a list\n    ",
    "target": "return",
    "accepted": ' x[0] if x & y else "\n\n    ',
}
UNCHECKED = Contamination(checked=False, reason="the run left no readable training_prompts.npy")


def traces(*, share, depth, nodes, round_s, seed, per_category=12):
    """Prompts of four categories whose rounds accept geometrically, cut at 64 tokens."""
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
                PromptResult(
                    prompt_id=f"{category}-{number}",
                    prompt_tokens=100 * (number + 1),
                    category=category,
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
    draft_s = 0.002 if kwargs["depth"] else 0.0
    costs = RoundCosts(draft_s=draft_s, verify_s=kwargs["round_s"] - draft_s, step_s=0.01)
    return ModeResult(
        prompt_results=traces(**kwargs),
        costs=costs,
        graphs_after_warmup=0,
        draft_passes=kwargs["depth"],
        split=split(draft_s=draft_s, round_s=kwargs["round_s"]),
    )


def split(*, draft_s, round_s):
    """Of 0.3 ms for the cache, 0.4 ms to accept, 0.2 ms of the host; a fused round saves 1 ms."""
    return RoundSplit(
        draft_s=draft_s, verify_s=round_s - draft_s - 0.0009, accept_s=0.0004, cache_move_s=0.0003,
        host_s=0.0002, round_s=round_s, fused_round_s=round_s - 0.001,
    )  # fmt: skip


def at_batch(batch, speedup):
    return BatchResult(
        batch=batch, mode="tree",
        speedup=Estimate(mean=speedup, ci95=[speedup - 0.2, speedup + 0.3]),
        tokens_per_s=Estimate(mean=1234.5, ci95=None), autoregressive_tokens_per_s=FIGURE,
        acceptance_length=FIGURE,
    )  # fmt: skip


def draft_run(name, seed):
    tree = measured(share=0.75, depth=6, nodes=20, round_s=0.015, seed=seed + 2)
    tree.exactness = Exactness(
        mismatches=[Mismatch(prompt_id="code-3", position=17, logit_gap=0.002)],
        tolerance=NEAR,
    )
    tree.bottleneck = "Of 3.15 tokens a round, verifying takes 1.21 autoregressive steps."
    said = [TextSpan(text=text, kind=kind) for kind, text in PIECES.items()]
    return DraftResult(
        contamination=Contamination(checked=True, count=1, ids=["docs-2"]),
        replay_result=ReplayResult(tau=FIGURE, all_positions=FIGURE),
        batch_results=[at_batch(16, 1.25), at_batch(4, 2.0)],
        samples=[SampleAnswer(prompt_id="code-3", mode="tree", pieces=said)],
        name=name,
        method="eagle3",
        longest_row=512,
        num_parameters=456_789,
        memory=DraftMemory(weights=1_827_156, state=65_536),
        untrained=measured(share=0.02, depth=6, nodes=20, round_s=0.015, seed=seed),
        chain=measured(share=0.7, depth=5, nodes=5, round_s=0.013, seed=seed + 1),
        tree=tree,
    )


def one_draft():
    """A report of one draft that is not quite exact, in bf16."""
    return build_report(
        SETTING,
        autoregressive=measured(share=0.0, depth=0, nodes=0, round_s=0.01, seed=1),
        ngram=measured(share=0.3, depth=5, nodes=5, round_s=0.012, seed=2),
        drafts=[draft_run("eagle3-demo", 3)],
    )


def three_drafts():
    """Of three drafts: a usual one, one with a target of its own, one verified by a lossy rule."""
    usual, adapted, lossy = (draft_run(name, seed) for seed, name in enumerate(COMPARED, 3))
    own = measured(share=0.0, depth=0, nodes=0, round_s=0.008, seed=1)
    for trace in own.prompt_results[:5]:
        trace.ids = [*trace.ids[:-1], 0]
    adapted.target = AdaptedTarget(
        name="demo adapted", num_parameters=3_500_000, adapted_from="demo", autoregressive=own
    )
    lossy.contamination = UNCHECKED
    for mode in (lossy.untrained, lossy.chain, lossy.tree):
        mode.verification, mode.exactness = "typical", Exactness()
    return build_report(
        SETTING,
        autoregressive=measured(share=0.0, depth=0, nodes=0, round_s=0.01, seed=1),
        ngram=measured(share=0.3, depth=5, nodes=5, round_s=0.012, seed=2),
        drafts=[usual, adapted, lossy],
    )


def printed(report, **kwargs):
    """What a terminal shows."""
    file = io.StringIO()
    print_report(report, Console(file=file, **kwargs))
    return file.getvalue()

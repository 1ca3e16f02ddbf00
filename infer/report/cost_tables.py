"""What decoding costs, as tables: latency, a round in parts, predicted speed-up, many rows."""

from infer.report.definitions import sentences
from infer.report.mode_tables import measured_of
from infer.report.number_format import ABSENT, Table, estimate, lossless, number, percentiles
from infer.report.prose import bottlenecks
from infer.report.views import Mode, Report

PARTS = ("verify", "accept", "cache_move", "draft", "host")  # of a round, in their order


def latency_table(report: Report) -> Table:
    rows = [
        [label, *(percentiles(mode[key]) for key in ("ttft_ms", "itl_ms", "e2e_ms"))]
        for label, mode in measured_of(report)
    ]
    return Table(
        title="Latency, ms",
        note=f"p50 / p90 / p99 over prompts. {sentences('TTFT', 'ITL', 'E2E')}",
        columns=["mode", "TTFT", "ITL", "E2E"],
        rows=rows,
    )


def efficiency_table(report: Report) -> Table:
    rows = [
        [
            label,
            number(mode["speedup"] and mode["speedup"]["mean"]),
            number(mode["predicted_speedup"]),
            number(mode["efficiency"]),
            estimate(mode["mbsu"]),
            *(number(costs[key]) for key in ("draft", "verify", "autoregressive_step")),
            ABSENT if mode["graphs_after_warmup"] is None else str(mode["graphs_after_warmup"]),
        ]
        for label, mode in measured_of(report)
        if (costs := mode["costs_ms"])
    ]
    return Table(
        title="Efficiency",
        note=sentences("efficiency", "predicted", "MBSU"),
        columns=[
            "mode", "speed-up", "predicted", "efficiency", "MBSU", "draft ms", "verify ms",
            "step ms", "new graphs",
        ],
        rows=rows,
    )  # fmt: skip


def split_table(report: Report, *, main: bool = False) -> Table:
    """The parts of a round, and in a sentence of each main mode what they come to."""
    return Table(
        title="Where a round's time goes, ms",
        note="Parts of the unfused round, timed one behind the other. "
        + sentences("sum", "round", "fused round"),
        columns=[
            "mode", *(part.replace("_", " ") for part in PARTS), "sum", "round", "fused round",
        ],
        rows=[
            [
                label,
                *(number(split[part]) for part in PARTS),
                number(sum(split[part] for part in PARTS)),
                number(split["round"]),
                number(split["fused_round"]),
            ]
            for label, mode in measured_of(report, main=main)
            if (split := split_of(mode))
        ],
        below=bottlenecks(report),
    )  # fmt: skip


def split_of(mode: Mode) -> dict[str, float] | None:
    """None where the mode was not taken apart; older reports do not name it."""
    return mode.get("split_ms")


def batch_table(report: Report) -> Table:
    """Each draft's tree alone, then with more and more rows."""
    return Table(
        title="Speed-up against batch size",
        note="Tree and autoregressive decoding with so many rows at a time, all rows together. "
        "Brackets: 95 % interval over prompts. Answers are compared with autoregressive decoding "
        "of one row.",
        columns=[
            "draft", "batch", "speed-up", "tokens/s", "autoregressive tokens/s", "tau", "lossless",
        ],
        rows=[
            [
                at["draft"],
                str(at["batch"]),
                estimate(at["speedup"]),
                f"{at['tokens_per_s']['mean']:.1f}",
                f"{at['autoregressive_tokens_per_s']['mean']:.1f}",
                number(at["acceptance_length"]["mean"]),
                lossless(at),
            ]
            for at in batches(report)
        ],
        labels=2,
        stacked=True,
    )  # fmt: skip


def batches(report: Report) -> list[dict]:
    """By draft and batch size, the tree's own figures as batch 1; none where none was asked for."""
    asked = report.get("batches", [])
    found = []
    for draft in report["drafts"]:
        many = [at for at in asked if at["draft"] == draft["name"]]
        tree, plain = draft["modes"]["tree"], draft["modes"].get("autoregressive")
        if many and tree and tree["speedup"]:
            plain = plain or report["autoregressive"]
            figures = {"autoregressive_tokens_per_s": plain["tokens_per_s"]}
            found.append({**tree, "draft": draft["name"], "batch": 1, "mode": "tree"} | figures)
        found += sorted(many, key=lambda at: at["batch"])
    return found


def replay_table(report: Report) -> Table:
    return Table(
        title="Replay of the target's own text",
        note=sentences("on-policy tau", "all-positions tau"),
        columns=["draft", "on-policy tau", "all-positions tau"],
        rows=[
            [name, estimate(found["tau"]), estimate(found["all_positions"])]
            for name, found in report.get("replay", {}).items()
        ],
    )

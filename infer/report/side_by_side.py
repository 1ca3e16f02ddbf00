"""Several drafts in one table: what each costs beside what it gains."""

from infer.report.definitions import sentences
from infer.report.number_format import ABSENT, Table, estimate, lossless, millions, number
from infer.report.prose import remarked
from infer.report.views import Mode, Report

NOTE = (
    f"{sentences('tau', 'draft ms', 'verify ms', 'MB')} Costs and speed-up are the tree's (of "
    "lookup: the chain's). Brackets: 95 % interval over prompts."
)


def side_by_side_table(report: Report) -> Table:
    """A row a draft: what it costs and what it gains."""
    ngram = report["ngram"]
    rows = [
        ["autoregressive", *[ABSENT] * 4, _step(ngram), *_taus(report["autoregressive"], None)],
        ["n-gram lookup", "ngram", "0", ABSENT, *_costs(ngram), *_taus(ngram, None)],
    ] + [
        [
            draft["name"],
            draft["method"],
            millions(draft["parameters"]),
            millions(sum(draft["memory_bytes"].values())),
            *_costs(draft["modes"]["tree"]),
            *_taus(
                draft["modes"]["chain"], draft["modes"]["tree"], own=draft["target"] is not None
            ),
        ]
        for draft in report["drafts"]
    ]
    return Table(
        title="Drafts side by side",
        note=remarked(NOTE, report),
        columns=[
            "draft", "method", "M params", "MB", "draft ms", "verify ms", "chain tau", "tree tau",
            "speed-up", "lossless",
        ],
        rows=rows,
        labels=2,
        stacked=True,
    )  # fmt: skip


def _costs(mode: Mode | None) -> list[str]:
    """Milliseconds of a round: the draft's, and the verification's."""
    costs = mode and mode["costs_ms"]
    return [number(costs[key]) if costs else ABSENT for key in ("draft", "verify")]


def _step(ngram: Mode | None) -> str:
    """The verification of an empty tree, which every other mode of the target is held against."""
    costs = ngram and ngram["costs_ms"]
    return number(costs["autoregressive_step"]) if costs else ABSENT


def _taus(chain: Mode | None, tree: Mode | None, *, own: bool = False) -> list[str]:
    """Tokens a round of chain and tree; speed-up and losslessness of the tree, or the chain.

    `own`: the answers are held against a target of the draft's own.
    """
    decisive = tree or chain
    taus = [mode and mode["acceptance_length"] for mode in (chain, tree)]
    return [
        *(number(tau["mean"]) if tau else ABSENT for tau in taus),
        estimate(decisive and decisive["speedup"]),
        lossless(decisive) + (" (own)" if own else "") if decisive else ABSENT,
    ]

"""Results of a tuning for W&B: the choice for each batch, context and draft."""

from infer.tuning.results import DraftTuning, list_results
from models.tracking import TrackedResults


def collect_results(tunings: list[DraftTuning]) -> TrackedResults:
    """Return a row for each result, as the summary on the terminal has it, and the choices."""
    rows = list_results(tunings)
    return TrackedResults(
        prefix="tune_report",
        figures={
            f"{tuning.name}/batch {result.batch}, context {result.context}": result.choice
            for tuning, result in rows
        },
        columns=["batch", "context", "draft", "choice", "predicted", "measured", "verdict"],
        rows=[
            [
                str(result.batch), str(result.context), tuning.name, result.choice,
                f"{tuning.predicted_speedup(result, result.best):.2f}",
                result.format_speedup(result.best), result.verdict.value,
            ]
            for tuning, result in rows
        ],
    )  # fmt: skip

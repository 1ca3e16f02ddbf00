"""Weights in bf16 with masters in fp32, shared by two processes, teach the demo's draft as much as fp32 does."""

import json
from pathlib import Path

import pytest

from infer.comparison.metric_changes import compare_metrics
from infer.comparison.page import parse_report
from infer.results.schema import Report
from tests.support.runs import run_python

LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
BF16 = ("device.precision=bfloat16", "parallel.draft=sharded")


def train(folder: Path, name: str, seed: int, *words: str, launcher: tuple[str, ...] = ()) -> Report:
    """Train the demo's draft on a CPU, decode all held-out prompts with the fp32 target, and return the report."""
    shared = ("device=cpu", "device.compile=false", f"output_dir={folder}", "evaluation=quick", "tree=chain")
    brief = ("tune=false", "evaluation.prompts_per_category=1", f"run_name={name}", f"seed={seed}")
    run_python(*launcher, "-m", "train", *shared, *brief, *words)
    checkpoint = (f"checkpoint={folder / name / 'checkpoint'}", f"run_name={name}-judged")
    judged = ("evaluation.prompts_per_category=null", "device.precision=float32", "tree.depth=4")
    run_python("-m", "infer.eval", *shared, *checkpoint, *judged)
    file = folder / f"{name}-judged" / "report.json"
    return parse_report(json.loads(file.read_text()), file)


@pytest.mark.parametrize("seed", range(3))
def test_tau_after_training_in_bf16_with_fp32_masters_is_that_of_fp32_within_noise(tmp_path, seed):
    fp32 = train(tmp_path, "fp32", seed, "device.precision=float32")
    bf16 = train(tmp_path, "bf16", seed, *BF16, launcher=LAUNCHER)
    (tau,) = (c for c in compare_metrics([fp32], [bf16]) if c.metric == "tau" and c.mode == "draft/chain")
    assert tau.before > 1.5
    assert tau.interval is not None
    assert not tau.is_beyond_noise

"""A few layers of large targets are measured, and a straight line leads from them to all layers."""

import pytest

from models.device.config import DeviceConf
from tests.support.models.tiny import CPU
from train.device import sizes
from train.device.checks import CheckContext, Outcome, OutcomeFile, run_checks

TINY = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 8,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}


def run_stage(context: CheckContext, **options) -> list[Outcome]:
    outcomes = OutcomeFile(context.folder / "outcomes.jsonl")
    run_checks("sizes", sizes.list_checks(context, {"owner/tiny": TINY}, **options), outcomes)
    return outcomes.read_outcomes()


def test_each_number_of_layers_is_measured_beside_its_plan_and_extrapolated(tmp_path):
    *measured, whole = run_stage(CheckContext(device=CPU, folder=tmp_path), layers=(1, 2))
    assert [outcome.name for outcome in measured] == ["owner/tiny, layers: 1", "owner/tiny, layers: 2"]
    assert {outcome.result for outcome in (*measured, whole)} == {"PASS"}, whole.detail
    assert all("planned" in outcome.detail and "compiled files unknown" in outcome.detail for outcome in measured)
    assert whole.detail.startswith("from 1 and 2 to 8 layers: ")


def figures(layers: int, **changes) -> sizes.Figures:
    """Return figures that lie on lines: 3 s + 2 s a layer, 10 ms + 1 ms a layer, 5 GB + 0.5 GB a layer."""
    on_line = {
        "layers": layers,
        "compile_s": 3.0 + 2 * layers,
        "prompt_ms": 1.0,
        "step_ms": 10.0 + layers,
        "round_ms": 20.0 - layers,
        "planned_bytes": 0,
        "peak_bytes": 5_000_000_000 + 500_000_000 * layers,
        "cache_bytes": None,
    }
    return on_line | changes


def test_a_straight_line_leads_to_all_layers():
    measured = [figures(layers) for layers in (1, 2, 4)]
    assert sizes.extrapolate(measured, "compile_s", 64) == pytest.approx(3 + 2 * 64)
    assert sizes.extrapolate(measured, "step_ms", 64) == pytest.approx(10 + 64)
    assert sizes.extrapolate(measured, "peak_bytes", 64) == pytest.approx(37e9)


def test_a_figure_without_a_rising_line_is_unknown():
    assert sizes.extrapolate([figures(1), figures(2)], "round_ms", 64) is None
    assert sizes.extrapolate([figures(1), figures(2, peak_bytes=None)], "peak_bytes", 64) is None


def test_layers_that_do_not_fit_are_skipped_with_both_sizes(tmp_path):
    small = CheckContext(device=CPU, folder=tmp_path, conf=DeviceConf(memory_gib=1e-6))
    measured, whole = run_stage(small, layers=(1,))
    assert (measured.result, whole.result) == ("SKIP", "SKIP")
    assert "takes " in measured.detail
    assert "cpu has 0.0 MiB for it" in measured.detail
    assert whole.detail == "a line takes two numbers of layers, got 0"


def test_a_model_that_cannot_be_computed_fails_with_a_remedy(tmp_path, monkeypatch):
    """Weights that overflow stand for a device that does: the target's own check refuses the logits."""
    monkeypatch.setattr(sizes, "WEIGHT_STD", float("inf"))
    measured, _ = run_stage(CheckContext(device=CPU, folder=tmp_path), layers=(1,))
    assert measured.result == "FAIL"
    assert measured.remedy == sizes.REMEDY


def test_the_default_models_have_the_shapes_of_qwen3(tmp_path):
    names = [check.name for check in sizes.list_checks(CheckContext(device=CPU, folder=tmp_path))]
    assert names == [
        f"{model}, {part}"
        for model in ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B")
        for part in ("layers: 1", "layers: 2", "layers: 4", "all layers")
    ]

"""Two whole sequences of docs/sequences.md run by their names, offline, on a thin target."""

import pytest

from tests.support.commands.own_target import save_target
from tests.support.commands.sequences import assert_lossless, run_sequence


@pytest.mark.parametrize("name", [pytest.param("qwen3-8b-eagle3", marks=pytest.mark.slow), "smollm2-135m-eagle3"])
def test_a_sequence_runs_from_prompts_to_a_report_by_its_name(name, tmp_path):
    save_target(tmp_path / "target", num_hidden_layers=4)
    assert_lossless(run_sequence(name, tmp_path, "draft.ttt_steps=2"))

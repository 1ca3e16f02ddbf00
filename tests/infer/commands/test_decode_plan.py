"""`infer.plan` computes the costs of a token on a machine, with a draft and without."""

import json

import pytest

from conf.entry import compose
from infer import plan as infer_plan
from infer.commands import decode_plan
from infer.config import DecodePlanConf
from models.device.config import MachineConf
from models.io.errors import UserError
from models.targets import pretrained
from tests.support.reports.planned import GENEROUS, HALF, config, model_outline


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a target's config.json and nothing else of it."""
    config().save_pretrained(tmp_path / "target")
    return tmp_path


def compose_plan(folder, *overrides: str) -> DecodePlanConf:
    base = [
        "draft=demo-medusa",
        f"target.path={folder / 'target'}",
        *"tree=chain tree.depth=3 prompt_tokens=60 context=200 device=cpu".split(),
    ]
    conf = compose("infer_plan", DecodePlanConf, [*base, *overrides])
    machine = {"chips": 1, "cores": 2, "bandwidth_gb_s": 50.0}
    conf.machine = MachineConf(**vars(GENEROUS) | machine)
    return conf


def test_a_token_takes_the_time_to_read_the_weights_and_the_cache(folder):
    first, second = decode_plan.list_options(compose_plan(folder))
    model = model_outline(HALF).model
    table = model.get_input_embeddings().weight.nbytes  # of which a token reads one row
    weights = sum(p.nbytes for p in model.parameters() if p.ndim > 1) - table
    assert first.alone_s == pytest.approx((weights + first.parts["cache"]) / 25e9, rel=1e-3)
    assert second.alone_s < first.alone_s
    assert first.most == 4


def test_the_break_even_length_is_the_cost_of_a_round_with_the_draft(folder):
    """Medusa's heads are read once a round, whatever the depth."""
    (short, _), (long, _) = (decode_plan.list_options(compose_plan(folder, f"tree.depth={depth}")) for depth in (1, 4))
    assert short.propose_s < long.propose_s
    assert long.break_even_length == (long.verify_s + long.propose_s) / long.alone_s
    assert long.break_even_length > short.break_even_length > 1


@pytest.mark.parametrize("words", ["draft=demo-eagle1", "draft=demo draft.layers=[0,1,3]"])
def test_cores_share_the_draft_and_the_head_that_it_reads_of_the_target(folder, words):
    alone, shared = decode_plan.list_options(compose_plan(folder, *words.split()))
    assert shared.propose_s == pytest.approx(alone.propose_s / 2, rel=0.02)


def test_a_proposal_reads_the_drafts_own_cache_which_cores_share_too(folder):
    words = ("draft=demo-lm", "draft.layers=[0,3]", "batch=4")
    (short, _), (long, long_shared) = (
        decode_plan.list_options(compose_plan(folder, *words, f"context={context}")) for context in (200, 500)
    )
    draft_cache = "draft cache"
    added = long.parts[draft_cache] - short.parts[draft_cache]
    assert added > 0
    assert long.propose_s - short.propose_s == pytest.approx(3 * added / 25e9, rel=1e-3)  # a chain of three
    assert long_shared.parts[draft_cache] == pytest.approx(long.parts[draft_cache] / 2, rel=1e-2)


def test_a_tree_with_copied_tokens_is_planned(folder):
    (option, _) = decode_plan.list_options(compose_plan(folder, "draft=demo-lm", "draft.layers=[0,3]", "tree=mixed"))
    assert option.parts["draft cache"] > 0


def test_a_prompt_is_read_in_a_pass_no_longer_than_the_context(folder):
    (within, _), (beyond, _) = (
        decode_plan.list_options(compose_plan(folder, "prompt_tokens=150", f"context={context}"))
        for context in (200, 300)
    )
    assert within.prompt_s < beyond.prompt_s  # 200 positions, and a bucket of 256


def test_a_plan_at_a_temperature_counts_its_operators_too(folder):
    greedy, _ = decode_plan.list_options(compose_plan(folder))
    sampled, _ = decode_plan.list_options(compose_plan(folder, "sampling.temperature=0.7", "sampling.top_p=0.9"))
    assert sampled.alone_s >= greedy.alone_s


def test_the_plan_creates_its_folder_and_a_file_that_cannot_be_written_is_refused_in_one_line(folder):
    file = folder / "new" / "plan.json"
    infer_plan.main.__wrapped__(compose_plan(folder, f"output={file}"))
    assert len(json.loads(file.read_text())) == 2
    with pytest.raises(UserError, match=r"output: must be a writable file, got .*plan\.json/plan "):
        infer_plan.main.__wrapped__(compose_plan(folder, f"output={file}/plan"))


def test_a_context_beyond_the_targets_positions_is_refused(folder):
    with pytest.raises(UserError, match=r"^context: prompt and answer must fit in the 512 positions of the target"):
        decode_plan.list_options(compose_plan(folder, "context=10000000"))


def test_rows_of_a_batch_share_the_weights_that_a_token_reads(folder):
    """PyTorch multiplies results of attention, of one token a row, with a weight that is expanded over the rows."""
    model = model_outline(HALF).model
    table = model.get_input_embeddings().weight.nbytes
    weights = sum(p.nbytes for p in model.parameters() if p.ndim > 1) - table
    option, _ = decode_plan.list_options(compose_plan(folder, "batch=4"))
    assert option.alone_s == pytest.approx((weights + option.parts["cache"]) / 25e9, rel=1e-3)


def test_a_target_whose_shape_ships_is_planned_without_a_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("asks the hub")

    monkeypatch.setattr(pretrained, "_from_pretrained", refuse)
    conf = compose("infer_plan", DecodePlanConf, ["draft=smollm2-135m-medusa", "machine=trn2.3xlarge", "tree=chain"])
    assert decode_plan.list_options(conf)


def test_a_share_of_the_memory_is_refused_where_nothing_would_be_left(folder):
    with pytest.raises(UserError, match=r"^memory_margin: must be at least 0 and below 1"):
        compose_plan(folder, "memory_margin=1.5")


def test_a_target_too_large_for_the_machine_is_refused(folder):
    run = compose_plan(folder)
    run.machine = MachineConf(**vars(GENEROUS) | {"memory_gib": 0.001})
    with pytest.raises(UserError, match="machine: must hold the target, got generous"):
        decode_plan.list_options(run)

"""A target cut by its own plan computes the same as the uncut target, with our layers or the engine's."""

import json
import multiprocessing
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.multiprocessing

from models.device.config import DeviceName
from models.drafts.options import CausalLMConf, DraftConf, InitFrom
from models.io.errors import UserError
from models.parallel.tensor_parallel import list_whole_tables, plan_shards
from models.targets.config import TargetConf
from tests.support.models import sharded
from tests.support.models.sharded import BF16_DRAFTS, CUT, RANKS, UNCUT, build_model
from tests.support.models.tiny import CPU, tiny_tokenizer
from tests.support.runs.toy_run import toy_conf
from train.config.run import ParallelConf, Weights
from train.distributed.build import build_parallel, check_parallel


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Run eight processes, forked from a server that has imported everything; return their measurements."""
    folder = tmp_path_factory.mktemp("ranks")
    build_model(CUT["qwen3"]()).save_pretrained(folder / "target")
    tiny_tokenizer(64).save_pretrained(folder / "target")
    multiprocessing.set_forkserver_preload(["tests.support.models.sharded"])
    torch.multiprocessing.start_processes(
        sharded.run_rank, (folder,), nprocs=sharded.PROCESSES, start_method="forkserver"
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(sharded.PROCESSES)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CUT)
def test_logits_of_a_cut_target_are_those_of_the_uncut_target(measured, name, ranks):
    for rank in range(ranks):
        difference, _ = measured[rank][f"{name}, {ranks} ranks"]
        assert difference < 1e-5


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_each_rank_holds_its_share(measured, name):
    """All but norms and full biases is cut: half on two ranks, and less than a fifth on eight."""
    assert measured[0][f"{name}, 2 ranks"][1] < 0.52
    assert measured[0][f"{name}, 8 ranks"][1] < 0.2


def test_tree_decoding_on_two_ranks_gives_the_text_of_a_single_process(measured):
    """The cache has the heads of a rank; the number of rounds is the same too."""
    for rank in range(2):
        uncut_texts, cut_texts = measured[rank]["texts"][:2], measured[rank]["texts"][2:]
        assert uncut_texts == cut_texts
        assert uncut_texts[0][-1] < 20  # rounds for 24 tokens: some drafts were accepted


def test_the_engine_of_the_xla_route_takes_the_same_path(measured):
    """It is called by its published signatures; drafts start, learn and are saved as with an uncut target."""
    for rank in range(4):
        engine = measured[rank]["engine"]
        assert engine["ranks"] == [rank % 2, rank // 2]
        assert engine["difference"] < 1e-5
        assert engine["held"] < 0.6
        assert engine["kv_heads"] == 1
        assert all(engine["same"])
        assert engine["rows of tables"] == [32, 32]  # of 64
        assert engine["rows of a head that a loss reads"] == 64
        assert engine["loss"] == pytest.approx(1, abs=1e-5)
        assert engine["gradients"] < 1e-5
        assert engine["same checkpoint"]


@pytest.mark.parametrize(
    ("name", "reads_head", "whole"),
    [
        ("qwen3", False, []),
        ("qwen3", True, ["lm_head"]),
        ("single key-value head", False, ["model.embed_tokens", "lm_head"]),  # which are tied
    ],
)
def test_the_xla_route_splits_tables_that_are_neither_tied_nor_read_by_a_loss(name, reads_head, whole):
    with torch.device("meta"):
        assert list_whole_tables(build_model(CUT[name]()), reads_head=reads_head) == whole


def test_moments_are_sharded_and_saved_in_full(measured):
    """ZeRO-1 on two processes learns as a single process does, and either continues from its state."""
    for rank in range(2):
        assert measured[rank]["moments"]["difference"] < 1e-6
        assert measured[rank]["moments"]["held"] == 2 * (3 * 3 + 1 * 5 + 3)  # of 30 weights


def test_weights_in_bf16_have_masters_in_fp32_which_a_state_holds(measured):
    """A run that was stopped goes on bit for bit; gradients of bf16 are what differs from a single process."""
    for rank in range(2):
        moments = measured[rank]["moments of bf16 weights"]
        assert moments["types"] == ["torch.bfloat16"]
        assert moments["saved in fp32"] == [True, True, True]
        assert moments["after a stop"] == 0
        assert moments["averaged"]
        assert 0 < moments["difference"] < 0.02  # of weights that four steps of 0.1 move


@pytest.mark.parametrize("method", BF16_DRAFTS)
def test_a_draft_with_weights_in_bf16_learns_and_is_evaluated_without_autocast(measured, method):
    """Frozen weights have the type of the rest, or a layer would be given inputs of another one."""
    for rank in range(2):
        figures = measured[rank][f"bf16 {method}"]
        assert figures["types"] == ["torch.bfloat16"]
        assert figures["moved"] > 0
        assert figures["loss"] > 0
        assert figures["tokens"] == 8


def test_without_the_engine_the_xla_route_says_so_before_anything_is_loaded():
    with pytest.raises(UserError, match=r"must be 1 without neuronx.* got 2 and .*run scripts/setup"):
        build_parallel(ParallelConf(tensor=2), replace(CPU, name="xla"), trackers=[])


def test_a_split_that_the_xla_route_lacks_is_refused_by_the_config_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "24")
    CUT["qwen3"]().save_pretrained(tmp_path)

    def check(draft_conf: DraftConf | None = None, **parallel: Any) -> None:
        optim = {"rows_per_step": 24}
        conf = toy_conf(target=TargetConf(path=str(tmp_path)), optim=optim, parallel=ParallelConf(**parallel))
        conf = replace(conf, draft=draft_conf or conf.draft)
        check_parallel(replace(conf, device=replace(conf.device, name=DeviceName.xla)))

    check(tensor=8)  # two key-value heads, each on four processes
    with pytest.raises(UserError, match=r"a divisor of its 8 attention heads, got 3"):
        check(tensor=3)
    with pytest.raises(UserError, match=r"parallel.target: must be replicated with device=xla"):
        check(target=Weights.sharded)
    pruned = CausalLMConf(init_from=InitFrom.pruned)
    with pytest.raises(UserError, match=r"parallel.tensor: must be 1 for draft.init_from=pruned with device=xla"):
        check(tensor=8, draft_conf=pruned)


@pytest.mark.parametrize(
    ("name", "ranks", "rule"),
    [
        ("qwen3", 3, "a divisor of its 8 attention heads, got 3"),
        ("qwen3", 16, "a divisor of its 8 attention heads, got 16"),
        ("phi3", 5, "a divisor"),
        ("qwen3_moe", 2, r"got model.layers.0.mlp.experts \(Qwen3MoeExperts, moe_tp_experts\)"),
        ("gpt_oss", 2, "a tensor-parallel plan for its layers, got none"),
        ("cohere", 2, "weights of a single head, got model.layers.0.self_attn.q_norm.weight"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_by_name(name, ranks, rule):
    """The shape alone decides: no weight is read."""
    with torch.device("meta"):
        model = build_model((CUT | UNCUT)[name]())
    with pytest.raises(UserError, match=f"parallel.tensor: a target of {name} needs .*{rule}"):
        plan_shards(model, ranks)

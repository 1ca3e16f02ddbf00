"""What a round costs: few timings find the best shape, and tuners wait for who is timing."""

import fcntl
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from infer.tuning import cost_model
from infer.tuning.candidates import USER_TREE, list_candidates
from infer.tuning.config import TuneConf
from infer.tuning.cost_model import CostBench, choose_candidate
from tests.support.reports.tuning import GIVEN_TREE, considered, prompts_of


def kind(one):
    return one.family.split("+")[0].split("-")[0]


class Machine:
    """Costs that are linear in nodes and passes, with a family's own extra; counts timings."""

    def __init__(self, node=0.02, draft_pass=0.1, noise=0.0):
        self.node, self.draft_pass, self.noise = node, draft_pass, noise
        self.timed, self.numbers = [], np.random.default_rng(0)

    def cost(self, one):
        extra = {"dynamic": 0.1, "product": 0.2, "static": 0.0}.get(kind(one), 0.0)
        copying = 0.05 if one.conf.ngram_tokens else 0.0
        return 1.1 + self.node * one.tree.size + self.draft_pass * one.tree.depth + extra + copying

    def steps(self, one):
        self.timed.append(one.name)
        return self.cost(one) * (1 + self.noise * float(self.numbers.standard_normal()))


def worth(one):
    """Concave in size, a little more for what adapts and for copies."""
    kinds = {"chain": 0.8, "static": 1.1, "dynamic": 1.2, "product": 1.25, USER_TREE: 1.0}
    reach = min(one.tree.depth, np.log1p(one.size))
    return 1 + kinds[kind(one)] * reach / 2 + 0.3 * bool(one.conf.ngram_tokens)


@pytest.mark.parametrize("node", [0.001, 0.01, 0.05, 0.3])
@pytest.mark.parametrize("draft_pass", [0.02, 0.4])
def test_few_timings_find_the_best_shape(node, draft_pass):
    found, machine = considered(nodes=(4, 8, 16, 24, 32, 63)), Machine(node, draft_pass)
    tokens = {one.name: float(worth(one)) for one in found}
    curve, best = choose_candidate(machine.steps, found, tokens)
    speeds = {one.name: tokens[one.name] / machine.cost(one) for one in found}
    assert speeds[best.name] >= 0.97 * max(speeds.values())
    assert curve.steps(best) == pytest.approx(machine.cost(best))
    assert len(machine.timed) < len(found) / 2


def test_where_no_budget_fits_the_draft_windows_and_the_given_tree_are_chosen_from():
    found = list_candidates(np.full((4, 1), 0.6), node_budgets=[8], ngram_tokens=0, user_tree=GIVEN_TREE)
    machine = Machine()
    tokens = {one.name: float(worth(one)) for one in found}
    curve, best = choose_candidate(machine.steps, found, tokens)
    assert {one.family for one in found} == {"chain", USER_TREE}
    assert all(curve.steps(one) > 0 for one in found)
    assert tokens[best.name] / machine.cost(best) == pytest.approx(
        max(tokens[one.name] / machine.cost(one) for one in found)
    )


@pytest.fixture(autouse=True)
def no_other_tuner(tmp_path, monkeypatch):
    """The tests have a lock of their own, and wait for nobody's timing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def bench(target, learned):
    draft, written = learned
    prompts = prompts_of(written)[:6]
    return CostBench(
        target=target, draft=draft, prompts=prompts, conf=TuneConf(max_new_tokens=12, repeats=2), batch=2, context=64
    )


def test_a_row_pays_for_its_slot_whoever_decodes_in_the_others(bench):
    """With rounds of 2 s in a batch of 2, a token of the target alone costs a second."""
    bench.prompts, bench.conf.repeats = bench.prompts[:1], 1
    bench.round_seconds = lambda _, generation: [2.0] * generation.rounds
    ((tokens, seconds),) = bench.benchmark_trees([])["autoregressive"]
    assert tokens == seconds > 0


@pytest.mark.parametrize("batch", [1, 2])
def test_every_prompt_counts_in_all_repeats(bench, batch):
    bench.batch = batch
    chain = next(one for one in considered() if one.name == "chain-2")
    rows = bench.benchmark_trees([chain])
    assert {name: len(sums) for name, sums in rows.items()} == dict.fromkeys(rows, 6)
    bench.conf.repeats = 1
    once = bench.benchmark_trees([chain])
    for name, sums in rows.items():
        assert (sums[:, 0] == 2 * once[name][:, 0]).all()


def test_a_prompt_that_ends_at_its_first_token_can_be_timed(bench, target, monkeypatch):
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", list(range(61)))
    one = next(one for one in considered() if one.name == "chain-2")
    assert bench.measure_steps(one) > 0
    assert bench.benchmark_trees([one])["chain-2"][:, 0].sum() == 0


def test_the_machine_is_reserved_only_while_something_is_timed(bench):
    reserved = []

    def note_lock(_, generation):
        reserved.append(_is_locked())
        return generation.round_s

    bench.round_seconds = note_lock
    chain = next(one for one in considered() if one.name == "chain-2")
    bench.measure_steps(chain)
    rows, turns = bench.batch, 3 * cost_model.TIMED_TURNS
    assert reserved == [True] * rows * turns
    assert not _is_locked()


def _is_locked() -> bool:
    """Whether another tuner could not compile now."""
    with (Path(tempfile.gettempdir()) / f"infer.tune-{os.getuid()}.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

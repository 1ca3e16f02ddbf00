"""What a round costs: few timings find the best shape, and tuners wait for who is timing."""

import fcntl
import os
import tempfile
import time
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from infer.tuning import cost_model
from infer.tuning.candidates import USER_TREE, list_candidates
from infer.tuning.config import TuneConf
from infer.tuning.cost_model import (
    CostBench,
    choose_candidate,
    hold_timing_lock,
)
from tests.support.tuning import GIVEN_TREE, considered, prompts_of


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
    found = list_candidates(
        np.full((4, 1), 0.6), node_budgets=[8], ngram_tokens=0, user_tree=GIVEN_TREE
    )
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
        target=target, draft=draft, prompts=prompts, conf=TuneConf(max_new_tokens=12, repeats=2),
        batch=2, context=64,
    )  # fmt: skip


def test_a_row_pays_for_its_slot_whoever_sits_in_the_others(bench, monkeypatch):
    one = next(one for one in considered() if one.name == "chain-2")
    bench.prompts, bench.conf.repeats = bench.prompts[:1], 1
    latest, decode = {}, bench.decode

    def recorded(decoder, prompts, *, stop_at_eos):
        latest[decoder] = decode(decoder, prompts, stop_at_eos=stop_at_eos)
        return latest[decoder]

    monkeypatch.setattr(bench, "decode", recorded)
    for name, rows in bench.benchmark_trees([one]).items():
        (answer,) = latest[bench.decoders[name]]
        assert rows.shape == (1, 2)
        assert rows[0, 1] == pytest.approx(sum(answer.round_s) / bench.batch)


def test_a_batch_is_held_to_what_the_target_alone_took_just_before(bench, monkeypatch):
    """A machine that is three times as slow for a while does not change who is how fast."""
    chains = [one for one in considered() if one.name in ("chain-1", "chain-2")]
    for one in chains:
        bench.decoder_for(one)
    slow, calls = [1.0, 1.0, 3.0, 3.0, 3.0, 3.0, 1.0, 1.0], iter(range(8))

    def timed(decoder, some):
        took = slow[next(calls)] * (2.0 if decoder.draft is None else 1.0)
        return np.array([[5.0, took]] * len(some))

    monkeypatch.setattr(bench, "_time_prompts", timed)
    sums = bench.benchmark_trees(chains)
    speeds = {name: rows.sum(0)[0] / rows.sum(0)[1] for name, rows in sums.items()}
    assert speeds["chain-1"] == pytest.approx(2 * speeds["autoregressive"])
    assert speeds["chain-2"] == pytest.approx(2 * speeds["autoregressive"])


def test_a_prompt_that_ends_at_its_first_token_can_be_timed(bench, target, monkeypatch):
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", list(range(61)))
    one = next(one for one in considered() if one.name == "chain-2")
    assert bench.measure_steps(one) > 0
    assert bench.benchmark_trees([one])["chain-2"][:, 0].sum() == 0


def test_the_machine_is_kept_only_while_something_is_timed(bench, monkeypatch):
    kept, decode = [], bench.decode

    def probe(*args, **kwargs):
        with (Path(tempfile.gettempdir()) / f"infer.tune-{os.getuid()}.lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as another tuner that compiles
                kept.append(False)
            except BlockingIOError:
                kept.append(True)
        return decode(*args, **kwargs)

    monkeypatch.setattr(bench, "decode", probe)
    one = next(one for one in considered() if one.name == "chain-2")
    bench.measure_steps(one)
    assert kept == [False, False] + [True] * 3 * cost_model.TIMED_TURNS


def test_who_times_does_not_wait_for_those_that_come_later():
    order: list[str] = []

    def take(name: str, *, alone: bool) -> Thread:
        def run() -> None:
            with hold_timing_lock(exclusive=alone):
                order.append(name)

        thread = Thread(target=run)
        thread.start()
        return thread

    with hold_timing_lock(exclusive=False):
        timing = take("timing", alone=True)
        while not _kept("gate"):
            time.sleep(0.001)
        later = take("compiling", alone=False)
        later.join(0.1)
        assert not order
    for thread in (timing, later):
        thread.join()
    assert order == ["timing", "compiling"]


def _kept(suffix: str) -> bool:
    with (Path(tempfile.gettempdir()) / f"infer.tune-{os.getuid()}.{suffix}").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

"""Few timings of rounds find the best tree."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from infer.engine.decode import Decoder
from infer.tuning.candidates import USER_TREE, TreeCandidate, list_candidates
from infer.tuning.config import TuneConf
from infer.tuning.cost_model import CostBench, choose_candidate, select_probes
from infer.tuning.results import DraftTuning, ExpectedTokens
from infer.tuning.search import choose_simplest, choose_tree, estimate_speedup
from models.drafts.ngram import NgramDraft
from models.targets.cache import StaticCache
from models.trees.config import TreeConf
from models.trees.tree import TreeKind
from tests.support.reports.tuning import GIVEN_TREE, TABLE, considered, prompts_of


def get_kind(candidate):
    return candidate.family.split("+")[0].split("-")[0]


class Machine:
    """A machine whose costs are linear in nodes and passes, with an extra by family; it counts timings."""

    def __init__(self, node=0.02, draft_pass=0.1):
        self.node, self.draft_pass, self.timed = node, draft_pass, []

    def compute_cost(self, candidate):
        extra = {"dynamic": 0.1, "product": 0.2, "static": 0.0}.get(get_kind(candidate), 0.0)
        copying = 0.05 if candidate.conf.ngram_tokens else 0.0
        return 1.1 + self.node * candidate.tree.size + self.draft_pass * candidate.tree.depth + extra + copying

    def time_steps(self, candidate):
        self.timed.append(candidate.name)
        return self.compute_cost(candidate)


def expect_tokens(candidate):
    """Return expected tokens that are concave in size, and more for dynamic trees and for copies."""
    kinds = {"chain": 0.8, "static": 1.1, "dynamic": 1.2, "product": 1.25, USER_TREE: 1.0}
    reach = min(candidate.tree.depth, np.log1p(candidate.size))
    return 1 + kinds[get_kind(candidate)] * reach / 2 + 0.3 * bool(candidate.conf.ngram_tokens)


@pytest.mark.parametrize("node", [0.001, 0.01, 0.05, 0.3])
@pytest.mark.parametrize("draft_pass", [0.02, 0.4])
def test_few_timings_find_the_best_shape(node, draft_pass):
    candidates, machine = considered(nodes=(4, 8, 16, 24, 32, 63)), Machine(node, draft_pass)
    tokens = {candidate.name: float(expect_tokens(candidate)) for candidate in candidates}
    curve, best = choose_candidate(machine.time_steps, candidates, tokens)
    speeds = {candidate.name: tokens[candidate.name] / machine.compute_cost(candidate) for candidate in candidates}
    assert speeds[best.name] >= 0.97 * max(speeds.values())
    assert curve.steps(best) == pytest.approx(machine.compute_cost(best))
    assert len(machine.timed) < len(candidates) / 2


def test_a_draft_that_no_budget_fits_has_windows_and_the_users_tree_as_candidates():
    candidates = list_candidates(np.full((4, 1), 0.6), node_budgets=[8], ngram_tokens=0, user_tree=GIVEN_TREE)
    machine = Machine()
    tokens = {candidate.name: float(expect_tokens(candidate)) for candidate in candidates}
    curve, best = choose_candidate(machine.time_steps, candidates, tokens)
    assert {candidate.family for candidate in candidates} == {"chain", USER_TREE}
    assert all(curve.steps(candidate) > 0 for candidate in candidates)
    assert tokens[best.name] / machine.compute_cost(best) == pytest.approx(
        max(tokens[candidate.name] / machine.compute_cost(candidate) for candidate in candidates)
    )


@pytest.fixture
def bench(target, learned):
    draft, written = learned
    prompts = prompts_of(written)[:6]
    return CostBench(
        target=target, draft=draft, prompts=prompts, conf=TuneConf(max_new_tokens=12, repeats=2), batch=2, context=64
    )


def test_the_time_of_a_row_is_its_share_of_the_batch_whatever_the_other_rows_do(bench):
    """With rounds of 2 s in a batch of 2, a token of the target alone costs a second."""
    bench.prompts, bench.conf.repeats = bench.prompts[:1], 1
    bench.round_seconds = lambda _, generation: [2.0] * generation.rounds
    ((tokens, seconds),) = bench.benchmark_trees(considered()[:1])["autoregressive"]
    assert tokens == seconds > 0


def test_a_batch_is_compared_with_the_target_alone_just_before_and_after(bench, monkeypatch):
    """A machine that is three times as slow for one candidate does not make that one slower."""
    chains = [candidate for candidate in considered() if candidate.name in ("chain-1", "chain-2")]
    for candidate in (None, *chains):
        bench.decoder_for(candidate)
    decode = Decoder.decode

    def measure(round_s: list[float]) -> list[float]:
        clock = iter(round_s)  # of each turn

        def decode_in_a_turn(self, *args, **options):
            generations, seconds = decode(self, *args, **options), next(clock)
            return [replace(generation, round_s=[seconds] * generation.rounds) for generation in generations]

        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "decode", decode_in_a_turn)
            rows = bench.benchmark_trees(chains)
        tokens, seconds = np.stack([sums.sum(0) for sums in rows.values()], 1)
        return [*(tokens / seconds / (tokens[0] / seconds[0]))]

    quiet = measure([1.0] * 8)
    assert min(quiet[1:]) > 1
    assert measure([1.0] * 4 + [3.0] * 4) == pytest.approx(quiet)


@pytest.mark.parametrize("context", [None, [1024]])
def test_a_context_that_is_asked_for_is_read_whole(bench, context, monkeypatch):
    """A round reads the filled slots alone, which would time every context as that of the prompts."""
    slots, read = set(), StaticCache.first_slots
    monkeypatch.setattr(StaticCache, "first_slots", lambda *args, **kw: slots.add(args[1]) or read(*args, **kw))
    bench.context, bench.conf.context = 1024, context
    bench.decoder_for(None)
    assert bool(slots) == (context is None)


@pytest.mark.parametrize("batch", [1, 2])
def test_every_prompt_counts_in_all_repeats(bench, batch):
    bench.batch = batch
    chain = next(candidate for candidate in considered() if candidate.name == "chain-2")
    rows = bench.benchmark_trees([chain])
    assert {name: len(sums) for name, sums in rows.items()} == dict.fromkeys(rows, 6)
    bench.conf.repeats = 1
    single = bench.benchmark_trees([chain])
    for name, sums in rows.items():
        assert (sums[:, 0] == 2 * single[name][:, 0]).all()


def test_without_time_one_shape_and_two_prompts_are_measured(bench, capsys):
    """The limit is passed before the first shape: 0 minutes."""
    bench.minutes, bench.batch = 0.0, 1
    candidates = considered()
    tuning = DraftTuning(
        name="new", directory=Path(), candidates=candidates, expected_tokens={}, acceptance=TABLE, rounds=[9] * 6
    )
    result = choose_tree(bench, tuning, candidates[:3])
    assert "0 minutes are up after 1 of " in capsys.readouterr().out
    assert list(result.speedups) == [candidates[0].name] == [result.best.name]
    assert result.best_over_each[result.best.name].ci95 == [1, 1]
    rows = bench.benchmark_trees(candidates[:1])
    assert {len(sums) for sums in rows.values()} == {2}


def test_after_its_time_nothing_more_is_timed_and_the_best_of_the_timed_is_chosen():
    machine, left = Machine(), iter([True, True, False, False])
    candidates = considered()
    tokens = {candidate.name: float(expect_tokens(candidate)) for candidate in candidates}
    curve, best = choose_candidate(machine.time_steps, candidates, tokens, has_time=lambda: next(left))
    timed = [candidate for candidate in candidates if curve.num_timings(candidate)]
    assert len(timed) == 3
    assert best in timed


def test_a_shape_that_cannot_be_compiled_is_left_out(bench, capsys, monkeypatch):
    """Out of memory for one shape alone; the others are measured."""
    bench.batch = 1
    candidates = [candidate for candidate in considered() if candidate.name.startswith("chain")][:3]
    decode_fully = CostBench._decode_fully

    def fail_for_second(self, decoder, prompts):
        if decoder.tree == candidates[1].tree:
            raise torch.OutOfMemoryError("no memory for this shape\nat all")
        return decode_fully(self, decoder, prompts)

    monkeypatch.setattr(CostBench, "_decode_fully", fail_for_second)
    assert bench.compile_in_time(candidates) == [candidates[0], candidates[2]]
    assert set(bench.decoders) == {"autoregressive", candidates[0].name, candidates[2].name}
    assert capsys.readouterr().out == "chain-2 is left out: OutOfMemoryError: no memory for this shape\n"
    with pytest.raises(RuntimeError, match="no memory"):
        bench.compile_in_time(candidates[1:2])


def test_a_predicted_best_that_cannot_be_compiled_is_replaced_by_the_next(capsys):
    candidates, machine = considered(), Machine()
    tokens = {candidate.name: float(expect_tokens(candidate)) for candidate in candidates}
    _, best = choose_candidate(machine.time_steps, candidates, tokens)
    _, other = choose_candidate(
        machine.time_steps,
        candidates,
        tokens,
        try_compile=lambda candidate: RuntimeError() if candidate is best else None,
    )
    assert other is not best


def test_a_probe_that_cannot_be_compiled_leaves_the_others_in_the_search(bench, monkeypatch):
    bench.batch, candidates = 1, considered(lookup=(4,))
    decode_fully = CostBench._decode_fully

    def fail_for_lookup(self, decoder, prompts):
        if isinstance(decoder.draft, NgramDraft):
            raise torch.OutOfMemoryError("no memory for this shape")
        return decode_fully(self, decoder, prompts)

    monkeypatch.setattr(CostBench, "_decode_fully", fail_for_lookup)
    bench.round_seconds = lambda _, generation: [1.0] * generation.rounds
    expected = {candidate.name: ExpectedTokens(delivered=2.0, tau=2.0) for candidate in candidates}
    tuning = DraftTuning(
        name="new", directory=Path(), candidates=candidates, expected_tokens=expected, acceptance=TABLE, rounds=[9] * 6
    )
    assert choose_tree(bench, tuning).candidates == [candidate for candidate in candidates if not candidate.is_lookup]


def test_a_shape_that_failed_is_neither_tried_again_nor_in_the_results(bench, monkeypatch):
    bench.batch, candidates = 1, considered()
    probes, decode_fully, tries = select_probes(candidates), CostBench._decode_fully, []
    best = next(candidate for candidate in candidates if candidate not in probes)

    def fail_for_best(self, decoder, prompts):
        if decoder.tree == best.tree:
            tries.append(decoder.tree)
            raise torch.OutOfMemoryError("no memory for this shape")
        return decode_fully(self, decoder, prompts)

    monkeypatch.setattr(CostBench, "_decode_fully", fail_for_best)
    bench.round_seconds = lambda _, generation: [1.0] * generation.rounds
    expected = {c.name: ExpectedTokens(delivered=9.0 if c is best else 2.0, tau=2.0) for c in candidates}
    tuning = DraftTuning(
        name="new", directory=Path(), candidates=candidates, expected_tokens=expected, acceptance=TABLE, rounds=[9] * 6
    )
    assert best not in choose_tree(bench, tuning).candidates
    assert len(tries) == 1


def test_a_speedup_has_no_negative_bound():
    ours, theirs = np.array([[9.0, 1.0], [1.0, 9.0], [1.0, 9.0]]), np.array([[5.0, 1.0]] * 3)
    speedup = estimate_speedup(ours, theirs)
    assert speedup is not None
    assert speedup.ci95 is not None
    assert speedup.ci95[0] >= 0


def test_of_shapes_as_fast_as_each_other_the_smallest_is_chosen_and_lookup_if_it_is_the_fastest():
    """Each prompt has 10 tokens; the columns are tokens and seconds."""
    small, large, *others = considered(lookup=(16,))
    lookup = others[-1]
    seconds = {small: [5.0, 5.2, 5.1], large: [5.1, 5.0, 5.0], lookup: [5.2, 5.0, 5.1]}
    rows = {c.name: np.stack([np.full(3, 10.0), np.array(times)], 1) for c, times in seconds.items()}
    assert choose_simplest([large, small], rows) is small
    assert choose_simplest([large, small, lookup], rows) is small
    rows[lookup.name][:, 1] -= 0.1
    assert choose_simplest([large, small, lookup], rows) is lookup
    rows[large.name][:, 1] /= 2
    assert choose_simplest([small, lookup, large], rows) is large


def test_copied_tokens_make_a_shape_larger():
    """The target scores them as well: a chain of three with eight copies is larger than a tree of four."""
    chain = TreeCandidate(name="chain-3+8", family="chain", conf=TreeConf(kind=TreeKind.chain, depth=3, ngram_tokens=8))
    tree = TreeCandidate(name="tree-4", family="tree", conf=TreeConf(kind=TreeKind.dynamic, depth=2, nodes=4))
    rows = {
        name: np.stack([np.full(3, 10.0), np.array(times)], 1)
        for name, times in {chain.name: [5.1, 5.2, 5.1], tree.name: [5.0, 5.2, 5.1]}.items()
    }
    assert choose_simplest([chain, tree], rows) is tree


@pytest.mark.parametrize(("prompts", "expected"), [(1, "large"), (2, "large"), (3, "small"), (8, "small")])
def test_of_one_or_two_prompts_the_fastest_is_chosen(prompts, expected):
    """The large one is a little faster; the interval of two prompts would hold much more."""
    small, large, *_ = considered()
    seconds = {small: [5.2, 5.0, 5.3, 5.0] * 2, large: [5.0, 5.1, 5.0, 5.1] * 2}
    rows = {c.name: np.stack([np.full(prompts, 10.0), np.array(s[:prompts])], 1) for c, s in seconds.items()}
    assert choose_simplest([small, large], rows) is {"small": small, "large": large}[expected]


def test_a_prompt_that_ends_at_its_first_token_can_be_timed(bench, target, monkeypatch):
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", list(range(61)))
    candidate = next(candidate for candidate in considered() if candidate.name == "chain-2")
    assert bench.measure_steps(candidate) > 0
    assert bench.benchmark_trees([candidate])["chain-2"][:, 0].sum() == 0

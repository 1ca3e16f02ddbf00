"""`python -m infer.tune`: what it chooses from, how few timings find the best, what it leaves."""

import fcntl
import json
import logging
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from conf.entry import compose
from data.prompts import EvalPrompt
from infer.config import EvalConf
from infer.costs import Bench, CostCurve, choose, probes, turn
from infer.decode import Decoder
from infer.intervals import Estimate
from infer.replay import texts
from infer.shapes import GIVEN, neighbours, shapes
from infer.tune import main, swept, worth_of
from infer.tune_config import TuneConf
from infer.tuned import Verdict
from models.errors import UserError
from models.sampling import SamplingConf
from models.tree import TreeConf, TreeKind
from models.tree_files import read_fields
from tests.tiny import new_draft

TABLE = np.array([[0.6, 0.2, 0.1, 0.05]] * 6)
GIVEN_TREE = TreeConf(kind=TreeKind.static, paths=[[0], [1], [2], [0, 0]])


KINDS = ("static", "dynamic", "product")


def considered(*, nodes=(4, 8, 16, 32), copied=4, table=TABLE):
    return shapes(table, nodes=list(nodes), copied=copied, given=GIVEN_TREE)


def test_every_window_and_every_budget_is_there_with_and_without_copies():
    found = {one.name: one for one in considered()}
    assert len(found) == len(considered())
    assert {f"chain-{window}" for window in range(1, 7)} <= set(found)
    for family in KINDS:
        assert [one.size for one in found.values() if one.family == family] == [4, 8, 16, 32]
    assert [one.size for one in found.values() if one.family == "static-d2"] == [4, 8, 16]
    assert all(one.tree.depth == 2 for one in found.values() if one.family.endswith("-d2"))
    for name, one in found.items():
        if not one.conf.copied:
            assert found[f"{name}+4"].tree.size == one.tree.size + 4
    assert found[GIVEN].tree.nodes == 4


def test_a_draft_of_one_token_has_windows_and_trees_of_one_token():
    found = considered(table=TABLE[:1], copied=0)
    assert {one.name for one in found} == {"chain-1", "static-4", "dynamic-4", "product-4"}


def test_the_overrides_decode_with_the_shape_that_was_measured(tmp_path):
    for one in considered():
        file = tmp_path / "tree.json"
        if one.conf.kind is TreeKind.static:
            file.write_text(json.dumps(one.tree.paths))
        conf = compose("eval", EvalConf, shlex.split(one.overrides(file)))
        assert conf.tree.build() == one.tree, one.name


def test_the_file_of_every_shape_says_what_it_is(tmp_path):
    file = tmp_path / "tree.json"
    for one in considered():
        file.write_text(json.dumps({"tree": one.fields, "paths": one.tree.paths}))
        said = read_fields(file)
        conf = TreeConf(**{**said, "kind": TreeKind(said["kind"])})
        assert conf.build() == one.tree, one.name


@pytest.mark.parametrize("said", [{"kind": "tall"}, {"kind": "chain", "depth": "2"}, {"kind":
    "dynamic", "leaves": 3}])  # fmt: skip
def test_a_file_that_says_something_else_is_refused(tmp_path, said):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps({"tree": said}))
    with pytest.raises(UserError, match=r"^tree.file: `tree` must hold a kind of chain, static"):
        read_fields(file)


def test_what_was_tuned_under_goes_into_the_command():
    asked = [
        "target.path='/my models/a=b'", "sampling.temperature=0.7", "sampling.seed=3",
        "prompts='it\\'s mine.jsonl'", "device.threads=1", "max_new_tokens=32",
    ]  # fmt: skip
    conf = compose("tune", TuneConf, asked)
    told = compose("eval", EvalConf, shlex.split(conf.carried(4)))
    assert (told.target, told.device) == (conf.target, conf.device)
    assert told.evaluation.sampling == conf.sampling
    assert told.evaluation.prompts == conf.prompts == "it's mine.jsonl"
    assert (told.evaluation.max_new_tokens, told.evaluation.batches) == (32, [4])
    assert compose("tune", TuneConf, []).carried(1) == ""


def test_only_an_interval_above_one_pays():
    for ci95, wanted in {
        (1.01, 1.3): Verdict.pays, (0.9, 1.3): Verdict.open, (0.5, 0.9): Verdict.loses,
    }.items():  # fmt: skip
        assert Verdict.of(Estimate(mean=1.0, ci95=list(ci95))) is wanted
    assert Verdict.of(Estimate(mean=3.0, ci95=None)) is Verdict.open
    assert Verdict.of(None) is Verdict.unmeasured


def test_neighbours_are_the_next_sizes_of_the_family():
    found = {one.name: one for one in considered()}
    for name, wanted in {
        "chain-1": ["chain-2"], "chain-3": ["chain-2", "chain-4"], "static-32": ["static-16"],
        "dynamic-8+4": ["dynamic-4+4", "dynamic-16+4"],
    }.items():  # fmt: skip
        assert [one.name for one in neighbours(found[name], list(found.values()))] == wanted


def test_a_sweep_has_every_window_and_a_dozen_trees():
    trees = [
        one for one in swept(considered(nodes=(4, 8, 16, 24, 32, 63))) if one.family != "chain"
    ]
    assert len(trees) == 13  # one of them given
    assert {one.size for one in trees if one.name != GIVEN} == {8, 16, 32, 63}


def kind(one):
    return one.family.split("+")[0].split("-")[0]


class Machine:
    """Costs that are linear in nodes and passes, with a family's own extra; counts timings."""

    def __init__(self, node=0.02, draft_pass=0.1, noise=0.0):
        self.node, self.draft_pass, self.noise = node, draft_pass, noise
        self.timed, self.numbers = [], np.random.default_rng(0)

    def cost(self, one):
        extra = {"dynamic": 0.1, "product": 0.2, "static": 0.0}.get(kind(one), 0.0)
        copying = 0.05 if one.conf.copied else 0.0
        return 1.1 + self.node * one.tree.size + self.draft_pass * one.tree.depth + extra + copying

    def steps(self, one):
        self.timed.append(one.name)
        return self.cost(one) * (1 + self.noise * float(self.numbers.standard_normal()))


def worth(one):
    """Concave in size, a little more for what adapts and for copies."""
    kinds = {"chain": 0.8, "static": 1.1, "dynamic": 1.2, "product": 1.25, GIVEN: 1.0}
    reach = min(one.tree.depth, np.log1p(one.size))
    return 1 + kinds[kind(one)] * reach / 2 + 0.3 * bool(one.conf.copied)


@pytest.mark.parametrize("node", [0.001, 0.01, 0.05, 0.3])
@pytest.mark.parametrize("draft_pass", [0.02, 0.4])
def test_few_timings_find_the_best_shape(node, draft_pass):
    found, machine = considered(nodes=(4, 8, 16, 24, 32, 63)), Machine(node, draft_pass)
    tokens = {one.name: float(worth(one)) for one in found}
    curve, best = choose(machine.steps, found, tokens)
    speeds = {one.name: tokens[one.name] / machine.cost(one) for one in found}
    assert speeds[best.name] >= 0.97 * max(speeds.values())
    assert curve.steps(best) == pytest.approx(machine.cost(best))
    assert len(machine.timed) < len(found) / 2


def test_where_no_budget_fits_the_draft_windows_and_the_given_tree_are_chosen_from():
    found = shapes(np.full((4, 1), 0.6), nodes=[8], copied=0, given=GIVEN_TREE)
    machine = Machine()
    tokens = {one.name: float(worth(one)) for one in found}
    curve, best = choose(machine.steps, found, tokens)
    assert {one.family for one in found} == {"chain", GIVEN}
    assert all(curve.steps(one) > 0 for one in found)
    assert tokens[best.name] / machine.cost(best) == pytest.approx(
        max(tokens[one.name] / machine.cost(one) for one in found)
    )


def test_the_choice_was_timed_twice():
    found, machine = considered(), Machine(noise=0.1)
    tokens = {one.name: float(worth(one)) for one in found}
    curve, best = choose(machine.steps, found, tokens)
    assert machine.timed.count(best.name) == curve.times(best) >= 2


def test_a_larger_shape_never_costs_less():
    found, curve = considered(copied=0), CostCurve()
    for one, steps in zip(probes(found), (1.5, 1.4, 2.0, 2.2, 2.1, 3.0), strict=True):
        curve.add(one, steps)
    windows = [curve.steps(one) for one in found if one.family == "chain" and not curve.times(one)]
    assert windows == sorted(windows)
    assert windows[0] == pytest.approx(1.5)


def prompts_of(written):
    return [
        EvalPrompt(id=f"{i}-{cut}", category="all", ids=text[:cut])
        for i, text in enumerate(written)
        for cut in (4, 7)
    ]


def test_what_a_shape_is_worth_is_what_decoding_with_it_yields(target, learned):
    draft, written = learned
    conf = TuneConf(depth=4, ranks=4, copied=3, max_new_tokens=20)
    prompts = prompts_of(written)[:6]
    read = texts(
        target, prompts, sampling=conf.sampling, max_new_tokens=20, layers=draft.needs.layers,
        ahead=4,
    )  # fmt: skip
    found = considered(nodes=(4, 8), copied=3, table=TABLE[:4])
    tokens = worth_of(target, draft, found, read, conf)
    assert set(tokens) == {one.name for one in found}
    for name in ("chain-2", "chain-4+3", "static-8", "dynamic-8+3", GIVEN):
        (one,) = [one for one in found if one.name == name]
        decoder = Decoder(
            target, draft, one.tree, sampling=SamplingConf(), slots=64, batch=len(prompts)
        )
        done = decoder.decode(
            [p.ids for p in prompts], row_ids=[p.row_id for p in prompts], max_new_tokens=20,
            eos_ids=target.eos_ids,
        )  # fmt: skip
        rounds = sum(len(row.accepted) for row in done)
        assert tokens[name].kept == pytest.approx(sum(len(row.ids) - 1 for row in done) / rounds)
        assert tokens[name].tau == pytest.approx(1 + sum(sum(r.accepted) for r in done) / rounds)


@pytest.fixture(autouse=True)
def no_other_tuner(tmp_path, monkeypatch):
    """The tests have a lock of their own, and wait for nobody's timing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def bench(target, learned):
    draft, written = learned
    prompts = prompts_of(written)[:6]
    return Bench(
        target=target, draft=draft, prompts=prompts, sampling=SamplingConf(), batch=2,
        context=64, max_new_tokens=12, say=lambda line: None,
    )  # fmt: skip


def test_a_row_pays_for_its_slot_whoever_sits_in_the_others(bench):
    one = next(one for one in considered() if one.name == "chain-2")
    bench.prompts = bench.prompts[:1]
    for name, rows in bench.race([one], repeats=1).items():
        assert rows.shape == (1, 2)
        assert rows[0, 1] == pytest.approx(bench.decoders[name].spent.round_s / bench.batch)


def test_a_batch_is_held_to_what_the_target_alone_took_just_before(bench, monkeypatch):
    """A machine that is three times as slow for a while does not change who is how fast."""
    chains = [one for one in considered() if one.name in ("chain-1", "chain-2")]
    for one in chains:
        bench.decoder(one)
    slow, calls = [1.0, 1.0, 3.0, 3.0, 3.0, 3.0, 1.0, 1.0], iter(range(8))

    def timed(decoder, some):
        took = slow[next(calls)] * (2.0 if decoder.draft is None else 1.0)
        return np.array([[5.0, took]] * len(some))

    monkeypatch.setattr(bench, "_tokens_and_seconds", timed)
    sums = bench.race(chains, repeats=2)
    speeds = {name: rows.sum(0)[0] / rows.sum(0)[1] for name, rows in sums.items()}
    assert speeds["chain-1"] == pytest.approx(2 * speeds["autoregressive"])
    assert speeds["chain-2"] == pytest.approx(2 * speeds["autoregressive"])


def test_a_prompt_that_ends_at_its_first_token_can_be_timed(bench, target, monkeypatch):
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", list(range(61)))
    one = next(one for one in considered() if one.name == "chain-2")
    assert bench.steps(one) > 0
    assert bench.race([one], repeats=1)["chain-2"][:, 0].sum() == 0


def test_the_machine_is_kept_only_while_something_is_timed(bench):
    compiled = []

    def probe(line: str) -> None:
        with (Path(tempfile.gettempdir()) / f"infer.tune-{os.getuid()}.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            compiled.append(line)  # beside a tuner that would do the same

    bench.say = probe
    one = next(one for one in considered() if one.name == "chain-2")
    bench.steps(one)
    assert len(compiled) == 2


def test_who_times_does_not_wait_for_those_that_come_later():
    order: list[str] = []

    def take(name: str, *, alone: bool) -> Thread:
        def run() -> None:
            with turn(alone=alone):
                order.append(name)

        thread = Thread(target=run)
        thread.start()
        return thread

    with turn(alone=False):
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


@pytest.fixture
def command(tmp_path, target, learned, monkeypatch, capsys, caplog):
    """`python -m infer.tune` in a folder with a good draft and one that was never trained."""
    caplog.set_level(logging.WARNING)
    monkeypatch.chdir(tmp_path)
    draft, written = learned
    target.model.save_pretrained("target")
    target.tokenizer.save_pretrained("target")
    for name, one in (("good", draft), ("untrained", new_draft(target))):
        one.save(Path(f"outputs/train/{name}/checkpoint"), target)
    Path("outputs/train/good/report.json").write_text("{}")
    rows = [{"text": " ".join(map(str, text[:5]))} for text in written]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()

    def run(*arguments: str) -> str:
        given = [
            "target.name=target", "prompts=prompts.jsonl", "device.threads=1",
            "device.compile=false", "nodes=[4]", "depth=2", "ranks=3", "max_new_tokens=8",
            "repeats=1", "batch=[4]", "tree=chain", "tree.depth=2",
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["infer.tune", *given, *arguments])
        main()
        return capsys.readouterr().out

    return run


def test_the_choice_is_left_as_a_file_that_says_how_to_decode_with_it(command):
    out = command("context=[40]")
    assert out.startswith("checkpoint: outputs/train/good/checkpoint\n")
    saved = json.loads(Path("outputs/infer.tune/tune/tune.json").read_text())
    (draft,) = saved["drafts"]
    (cell,) = draft["cells"]
    assert (cell["batch"], cell["context"]) == (4, 40)
    shape = {one["name"]: one for one in cell["shapes"]}[cell["best"]]
    assert shape["measured_speedup"]["mean"] > 0
    assert shape["cost_timed"]
    assert cell["pick"] in (cell["best"], None)
    if cell["pick"]:
        file = Path("outputs/infer.tune/tune/good-b4-c40.json")
        left = json.loads(file.read_text())
        assert f"checkpoint={draft['checkpoint']} {left['overrides']}" in out
        conf = compose("eval", EvalConf, shlex.split(left["overrides"]))
        assert conf.tree.build().size == shape["nodes"]
        assert (conf.target.name, conf.evaluation.prompts) == ("target", "prompts.jsonl")
        assert (conf.evaluation.max_new_tokens, conf.evaluation.batches) == (8, [4])


def test_a_draft_that_is_never_right_is_not_worth_speculating(command):
    out = command("checkpoint=[outputs/train/good/checkpoint,outputs/train/untrained/checkpoint]",
                  "copied=0")  # fmt: skip
    saved = json.loads(Path("outputs/infer.tune/tune/tune.json").read_text())
    assert [draft["name"] for draft in saved["drafts"]] == ["good", "untrained"]
    (cell,) = saved["drafts"][1]["cells"]
    assert cell["pick"] is None
    assert "choice: do not speculate" in out
    assert out.count("infer.eval checkpoint=outputs/train/untrained") == 0


REFUSED = {
    "batch=[]": "batch: must list numbers of at least 1, got []",
    "nodes=[0]": "nodes: must list numbers of at least 1, got [0]",
    "depth=0": "depth: must be at least 1, got 0",
    "copied=-1": "copied: must not be negative, got -1; 0 copies none",
    "max_new_tokens=1": "max_new_tokens: must be at least 2, got 1",
    "ranks=1 depth=4 nodes=[8,16]": "nodes: must list one of at most the 4 paths that depth and "
    "ranks give, got [8, 16]; raise depth or ranks",
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_mistakes_are_answered_in_one_line(mistake):
    with pytest.raises(UserError) as refused:
        compose("tune", TuneConf, mistake.split())
    assert str(refused.value) == REFUSED[mistake]


BEFORE = {
    "tree=static tree.file=none.json": "tree.file: must be a readable JSON file, got none.json",
    "prompts=none.jsonl": "prompts: must be ",
    "checkpoint=none": "checkpoint: ",
}


@pytest.mark.parametrize("mistake", BEFORE)
def test_what_can_be_known_is_refused_before_a_model_is_loaded(command, capsys, mistake):
    with pytest.raises(SystemExit):
        command(*mistake.split(), "target.name=no-such-target")
    assert capsys.readouterr().err.startswith(f"error: {BEFORE[mistake]}")


def test_a_context_that_no_answer_fits_in_is_refused_before_replay(command, capsys):
    with pytest.raises(SystemExit):
        command("context=[40,12]")
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == (
        "error: context: must hold prompt and answer, 5 + 8 tokens, got 12; "
        "raise it or shorten max_new_tokens"
    )
    assert "replayed" not in captured.out

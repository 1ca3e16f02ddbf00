"""`python -m infer.calibrate`: the best static tree by a table of measured acceptance."""

import json
import logging
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from conf.entry import compose
from data.demo.prompts import held_out_prompts
from data.eval_prompts.prompts import EvalPrompt
from infer.calibrate import main
from infer.config import CalibrateConf, EvalConf
from infer.engine.decode import Decoder
from infer.measure.acceptance import (
    AcceptanceCounter,
    best_first_paths,
    build_comb,
    expected_length,
)
from infer.measure.prompt_choice import load_calibration_prompts
from infer.tree_calibration import calibrate_tree
from models.errors import UserError
from models.speculate.config import SamplingConf, TreeConf
from models.speculate.tree import TreeKind, tree_from_paths
from models.speculate.tree_formats import read_paths
from tests.support.tiny import chain, demo_target, mixed, new_draft, tree
from tests.support.watching import watch_rounds

NEW = 32


def prompts_of(texts) -> list[EvalPrompt]:
    return [
        EvalPrompt(id=f"{i}-{cut}", category="all", ids=text[:cut])
        for i, text in enumerate(texts)
        for cut in (4, 7, 10)
    ]


def tables():
    """Small random tables: shares of a row sum to less than 1; some are 0, some rows are equal."""
    numbers = np.random.default_rng(0)
    for number in range(12):
        table = numbers.dirichlet(np.ones(4), size=3)[:, :3]  # ranks need not fall
        if number % 3 == 0:
            table[numbers.random(table.shape) < 0.3] = 0.0
        if number % 4 == 0:
            table[1] = table[0]
        yield table


def all_trees(depth: int, ranks: int, nodes: int):
    """Every prefix-closed set of so many paths, grown one path at a time."""
    paths = [p for d in range(1, depth + 1) for p in product(range(ranks), repeat=d)]
    found = {frozenset()}
    for _ in range(nodes):
        found = {
            tree | {path}
            for tree in found
            for path in paths
            if path not in tree and (len(path) == 1 or path[:-1] in tree)
        }
    return found


def promised(table, paths) -> float:
    """Tokens a round, path by path."""
    return 1 + sum(np.prod([table[d, rank] for d, rank in enumerate(path)]) for path in paths)


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_no_tree_of_so_many_nodes_promises_more_than_the_one_found(nodes):
    trees = all_trees(3, 3, nodes)
    for table in tables():
        paths = best_first_paths(table, nodes)
        assert len({tuple(path) for path in paths}) == nodes
        assert promised(table, paths) == pytest.approx(max(promised(table, t) for t in trees))


def test_the_whole_tree_can_be_asked_for_and_is_a_tree():
    for table in tables():
        paths = best_first_paths(table, 3 + 9 + 27)
        shape = tree_from_paths(paths)
        assert (shape.nodes, shape.depth) == (39, 3)
        assert expected_length(table, shape) == pytest.approx(
            promised(table, best_first_paths(table, 39))
        )


def test_only_covered_trees_are_promised_anything():
    table = next(tables())
    assert expected_length(table, chain(3)) == pytest.approx(
        promised(table, [[0], [0, 0], [0] * 3])
    )
    for shape in (chain(4), tree_from_paths([[0], [3]]), tree(), mixed()):
        assert expected_length(table, shape) is None


def by_hand(rounds, depth):
    """(rounds, hits) in loops; a round is its candidates by depth, and what was emitted."""
    visits, hits = [0] * depth, [[0] * 3 for _ in range(depth)]
    for candidates, emitted in rounds:
        for d in range(depth):
            visits[d] += 1
            if emitted[d] not in candidates[d]:
                break
            rank = candidates[d].index(emitted[d])
            hits[d][rank] += 1
            if rank > 0:
                break
    return visits, hits


def test_the_table_counts_along_the_likeliest_path_of_each_row(target, learned):
    """Two rows at a time, of different lengths: one goes on when the other has ended."""
    draft, texts = learned
    tally, rounds = AcceptanceCounter(3, 3), []

    def watch(proposal, emitted, count):
        tally(proposal, emitted, count)
        for row in range(2):
            if count[row] > 0:
                ids = proposal.ids[row].tolist()
                rounds.append(([ids[0:3], ids[3:6], ids[6:9]], emitted[row].tolist()))

    decoder = Decoder(
        target, draft, tree_from_paths(build_comb(3, 3)), sampling=SamplingConf(), slots=64, batch=2
    )
    watch_rounds(decoder, watch)
    for first in range(0, 8, 2):
        some = [texts[first][:4], texts[first + 1][:9]]
        decoder.decode(some, row_ids=[0, 1], max_new_tokens=NEW)
    visits, hits = by_hand(rounds, 3)
    assert tally.rounds.tolist() == visits
    assert tally.hits.tolist() == hits
    assert visits[0] == len(rounds) > visits[1] > visits[2] > 0
    assert sum(sum(row[1:]) for row in hits) > 0


def test_of_the_comb_itself_the_promise_is_the_measurement(target, learned):
    """Shares of its own rounds, multiplied along the path: nothing is assumed of it."""
    draft, texts = learned
    tally, shape = AcceptanceCounter(4, 5), tree_from_paths(build_comb(4, 5))
    decoder = Decoder(target, draft, shape, sampling=SamplingConf(), slots=64)
    watch_rounds(decoder, tally)
    prompts = prompts_of(texts)
    rows = decoder.decode(
        [prompt.ids for prompt in prompts], row_ids=[prompt.row_id for prompt in prompts],
        max_new_tokens=NEW, eos_ids=target.eos_ids,
    )  # fmt: skip
    accepted = [count for row in rows for count in row.accepted]
    measured = 1 + sum(accepted) / len(accepted)
    assert expected_length(tally.acceptance(), shape) == pytest.approx(measured)


def test_the_tree_found_beats_the_chain_and_keeps_its_promise(target, learned):
    """Within 20 %: acceptance behind a sibling is taken to be as behind the likeliest child.

    Prompts of which half were learned are the worst case: where a sibling is right, the text is
    more often one that the draft does not know.
    """
    draft, texts = learned
    conf = CalibrateConf(
        nodes=12, depth=4, ranks=5, max_new_tokens=NEW,
        tree=TreeConf(kind=TreeKind.static, paths=[[0], [1], [2], [0, 0]]),
    )  # fmt: skip
    unknown = [[1 + 7 * i % 60, 2 + 11 * i % 59, 5] for i in range(8)]  # a chain would do else
    prompts = prompts_of(texts)[:8] + [
        EvalPrompt(id=str(i), category="all", ids=ids) for i, ids in enumerate(unknown)
    ]
    found = calibrate_tree(target, draft, prompts, conf)
    tried = found.trees["found"]
    assert tried.tree == tree_from_paths(found.paths)
    assert tried.tree.nodes == 12
    assert tried.measured.mean >= found.trees["chain"].measured.mean
    assert tried.expected > found.trees["chain"].expected > 1.2
    for name, one in found.trees.items():
        assert one.expected == pytest.approx(one.measured.mean, rel=0.2), name


def test_a_tree_deeper_than_the_draft_is_not_tried(target, learned):
    draft = new_draft(target, max_depth=2)
    conf = CalibrateConf(nodes=3, depth=2, ranks=2, max_new_tokens=4,
                         tree=TreeConf(kind=TreeKind.chain, depth=3))  # fmt: skip
    found = calibrate_tree(target, draft, prompts_of(learned[1])[:2], conf)
    assert found.trees["tree=chain"].measured is None
    assert found.trees["found"].measured is not None
    conf.depth = 3
    with pytest.raises(UserError, match=r"^depth: must be at most the 2 tokens .* got 3; lower"):
        calibrate_tree(target, draft, prompts_of(learned[1])[:2], conf)


def test_the_demos_calibration_prompts_are_not_held_out():
    prompts = load_calibration_prompts(demo_target().tokenizer, "demo", 12)
    assert len(prompts) == 12
    target = demo_target()
    held_out = [target.tokenizer(p.text)["input_ids"] for p in held_out_prompts()]
    assert not [prompt.id for prompt in prompts if prompt.ids in held_out]
    assert len({prompt.category for prompt in prompts}) == 4


@pytest.fixture
def command(tmp_path, target, learned, monkeypatch, capsys, caplog):
    """`python -m infer.calibrate` in a folder with a finished run: what it printed."""
    caplog.set_level(logging.WARNING)  # and back: Hydra leaves the root logger at ERROR
    monkeypatch.chdir(tmp_path)
    draft, texts = learned
    target.model.save_pretrained("target")
    target.tokenizer.save_pretrained("target")
    draft.save(Path("outputs/train/newest/checkpoint"), target)
    Path("outputs/train/newest/report.json").write_text("{}")
    rows = [{"text": " ".join(map(str, text[:5]))} for text in texts]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()

    def run(*arguments: str) -> str:
        given = [
            "target.name=target", "prompts=prompts.jsonl", "device.threads=1", "nodes=6", "depth=3",
            "ranks=3", "max_new_tokens=8",
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["infer.calibrate", *given, *arguments])
        main()
        return capsys.readouterr().out

    return run


def test_a_bare_call_calibrates_the_newest_run_and_leaves_a_tree_file(command):
    out = command()
    assert out.startswith("checkpoint: outputs/train/newest/checkpoint\n")
    file = Path("outputs/infer.calibrate/calibrate/tree.json")
    assert f"tree=static tree.file={file}" in out
    conf = compose("eval", EvalConf, ["tree=static", f"tree.file={file}"])
    assert conf.tree.build() == tree_from_paths(read_paths(file))
    assert len(read_paths(file)) == 6
    saved = json.loads(file.read_text())
    table = np.array(saved["acceptance"])
    assert table.shape == (3, 3)
    assert read_paths(file) == best_first_paths(table, 6)
    assert set(saved["measured"]) == {"found", "chain", "tree=static"}
    assert saved["expected"]["found"] == pytest.approx(promised(table, read_paths(file)))
    assert saved["prompts"]["count"] == 8
    for line in ("found             6", "chain             3", "tree=static      12"):
        assert line in out


REFUSED = {
    "depth=0": "depth: must be at least 1, got 0",
    "ranks=1": "nodes: must be at most the 3 paths that depth and ranks give, got 6; "
    "raise depth or ranks",
    "depth=17": "depth: must be at most the 16 tokens that the draft can propose, got 17; "
    "lower depth",
    "prompts=none.jsonl": "prompts: must be a readable JSONL file, got none.jsonl; "
    "`demo` stands for the demo's prompts",
    "output=target/config.json/tree.json": "output: must be a writable file, "
    "got target/config.json/tree.json (File exists); choose another",
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_mistakes_are_answered_in_one_line(command, mistake, capsys):
    with pytest.raises(SystemExit) as stop:
        command(mistake)
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {REFUSED[mistake]}"

"""Tree files hold the same tree in three formats, recognized on reading."""

import json
import sys

import numpy as np
import pytest

from infer.measure.acceptance import best_first_paths
from infer.tree_file import main
from models.io.errors import UserError
from models.trees.config import TreeConf
from models.trees.tree import TreeKind, tree_from_paths
from models.trees.tree_formats import TreeFormat, read_paths, write_paths


def build_trees():
    """Build trees of many shapes; acceptance falls with the rank, so no tree skips a rank."""
    for seed in range(8):
        shares = np.random.default_rng(seed).dirichlet(np.ones(6), size=4)
        yield best_first_paths(-np.sort(-shares), nodes=3 + 7 * seed)


@pytest.mark.parametrize("form", TreeFormat)
def test_a_tree_survives_every_format(tmp_path, form):
    file = tmp_path / "tree.json"
    for paths in build_trees():
        write_paths(paths, file, tree_format=form)
        assert tree_from_paths(read_paths(file)) == tree_from_paths(paths)
        conf = TreeConf(kind=TreeKind.static, file=str(file), paths=[[0], [0, 0]])
        assert conf.build().nodes == len(paths)  # a file replaces the shipped paths


def test_a_file_has_no_copied_tokens_beside_it_but_its_own(tmp_path):
    file = tmp_path / "tree.json"
    write_paths([[0], [0, 0]], file, tree_format=TreeFormat.medusa)
    assert TreeConf(ngram_tokens=8, file=str(file)).build().ngram_tokens == 0
    file.write_text(json.dumps({"tree": {"kind": "chain", "depth": 2, "ngram_tokens": 4}}))
    assert TreeConf(ngram_tokens=8, file=str(file)).build().ngram_tokens == 4


def test_adjacency_is_numbered_level_by_level(tmp_path):
    file = tmp_path / "tree.json"
    write_paths([[0], [1, 0], [1], [0, 0], [0, 1], [1, 0, 0]], file, tree_format=TreeFormat.nxd)
    assert json.loads(file.read_text()) == {"0": ["1", "2"], "1": ["3", "4"], "2": ["5"], "5": ["6"]}


def test_adjacency_cannot_skip_a_rank(tmp_path):
    with pytest.raises(UserError, match=r"^format: nxd needs every rank .* got \[1, 2\] without"):
        write_paths([[0], [1], [1, 2]], tmp_path / "tree.json", tree_format=TreeFormat.nxd)


REFUSED = {
    '{"tree": [[0]]}': "must hold a list of rank paths, got {}; e.g. [[0], [0, 0]]",
    "[0, 1]": "must hold a list of rank paths, got {}; e.g. [[0], [0, 0]]",
    '[["a"]]': "must hold a list of rank paths, got {}; e.g. [[0], [0, 0]]",
    "[]": "must hold a list of rank paths, got {}; e.g. [[0], [0, 0]]",
    '{"0": []}': "must hold a list of rank paths, got {}; e.g. [[0], [0, 0]]",
    "[[0.5]]": "must hold a list of rank paths, got {}; e.g. [[0], [0, 0]]",
    '{"0": ["2", "1"]}': "must number nodes level by level from root 0, got {} with ['2', '1'] "
    "below node 0; expected ['1', '2']",
    '{"0": ["1"], "4": ["5"]}': "must number nodes level by level from root 0, got {} with "
    "children of 4, which is not a node; remove them",
    '{"0": ["1"], "1": ["1"]}': "must number nodes level by level from root 0, got {} with ['1'] "
    "below node 1; expected ['2']",
    '{"0": 3}': "must number nodes level by level from root 0, got {} with 3 below node 0; list its children",
    '{"0": ["1"], "1": null}': "must number nodes level by level from root 0, got {} with None below node 1; "
    "list its children",
}


@pytest.mark.parametrize("content", REFUSED)
def test_other_files_are_refused_in_a_single_line(tmp_path, content):
    file = tmp_path / "tree.json"
    file.write_text(content)
    with pytest.raises(UserError) as refused:
        read_paths(file)
    assert str(refused.value) == f"tree.file: {REFUSED[content].replace('{}', str(file))}"


def test_a_negative_rank_is_told_as_such():
    with pytest.raises(UserError, match=r"^tree.paths: ranks count from 0, got \[\[0\], \[-1\]\]; 0 is the likeliest"):
        tree_from_paths([[0], [-1]])


def test_numbers_of_a_file_that_do_not_go_together_are_the_files(tmp_path):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps({"tree": {"kind": "dynamic", "depth": 5, "nodes": 3}}))
    with pytest.raises(UserError, match=r"^tree.file: must hold a valid tree, got .*tree.json: tree.nodes: .* got 3"):
        TreeConf(file=str(file)).build()


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["infer.tree_file", *arguments])
        main()
        return capsys.readouterr().out

    return run


def test_the_command_converts_there_and_back(command, tmp_path):
    assert command("tree=medusa-63", "format=nxd", "output=a/nxd.json") == "63 nodes: a/nxd.json\n"
    command("tree.file=a/nxd.json", "format=medusa", "output=medusa.json")
    paths = json.loads((tmp_path / "medusa.json").read_text())
    assert [0, 0, 0, 1] in paths
    assert len(paths) == 63


def test_a_tree_that_no_file_can_hold_is_refused(command, capsys):
    with pytest.raises(SystemExit):
        command("tree=mixed")
    assert capsys.readouterr().err.startswith("error: tree: must be a chain or a static tree, got")

"""The `tree` group takes no key that the kind of the tree does not read."""

import pytest

from models.io.errors import UserError
from models.trees.config import TreeConf
from models.trees.tree import TreeKind


@pytest.mark.parametrize(
    ("kind", "key"), [(TreeKind.chain, "nodes"), (TreeKind.chain, "beam_width"), (TreeKind.static, "depth")]
)
def test_a_number_that_the_kind_does_not_read_is_refused(kind, key):
    with pytest.raises(
        UserError, match=rf"^tree\.{key}: is not read for tree\.kind={kind.value}, got 9; leave it out, or"
    ):
        TreeConf(kind=kind, paths=[[0]] if kind is TreeKind.static else None, **{key: 9})


def test_a_file_replaces_all_other_keys(tmp_path):
    file = tmp_path / "chain.json"
    file.write_text('{"tree": {"kind": "chain", "depth": 3}}')
    assert TreeConf(nodes=24, children=8, file=str(file)).read() == TreeConf(kind=TreeKind.chain, depth=3)

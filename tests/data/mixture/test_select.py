"""A mixture gives each source exactly its share, and always the same rows of it."""

from collections import Counter

import numpy as np
import pytest

from conf.entry import compose
from data.mixture.select import compute_quotas, select_rows
from data.prepare_config import MixtureConf, PrepareConf, SourceConf
from models.io.errors import UserError


def build_mixture(rows=None, **shares) -> MixtureConf:
    sources = {
        name: SourceConf(path=name, share=None if share is None else float(share)) for name, share in shares.items()
    }
    return MixtureConf(sources=sources, rows=rows)


@pytest.mark.parametrize(
    ("conf", "available", "expected"),
    [
        (build_mixture(a=None, b=None), {"a": 5, "b": 7}, {"a": 5, "b": 7}),
        (build_mixture(a=0.7, b=0.3), {"a": 700, "b": 900}, {"a": 700, "b": 300}),
        (build_mixture(a=2, b=1), {"a": 10, "b": 5}, {"a": 10, "b": 5}),  # shares are weights
        (build_mixture(a=1, b=1, c=1), {"a": 9, "b": 9, "c": 3}, {"a": 3, "b": 3, "c": 3}),
        (build_mixture(10, a=1, b=1, c=1), {"a": 9, "b": 9, "c": 9}, {"a": 3, "b": 4, "c": 3}),
        (build_mixture(a=0.999, b=0.001), {"a": 5, "b": 5}, {"a": 5, "b": 0}),
        (build_mixture(101, a=0.5, b=0.5), {"a": 50, "b": 51}, {"a": 50, "b": 51}),
        (build_mixture(a=0.7, b=0.2, c=0.1), {"a": 7, "b": 2, "c": 1}, {"a": 7, "b": 2, "c": 1}),
    ],
)
def test_each_source_gives_its_share_in_whole_rows(conf, available, expected):
    assert compute_quotas(available, conf) == expected


def test_rounding_never_takes_more_rows_than_there_are():
    rng = np.random.default_rng(0)
    for _ in range(300):
        shares = dict(zip("abc", rng.integers(1, 20, 3).tolist(), strict=True))
        available = dict(zip("abc", rng.integers(1, 60, 3).tolist(), strict=True))
        quotas = compute_quotas(available, build_mixture(**shares))
        total = sum(quotas.values())
        assert all(quotas[name] <= available[name] for name in shares)
        exact = {name: total * share / sum(shares.values()) for name, share in shares.items()}
        assert all(abs(quotas[name] - exact[name]) <= 1 + 1e-9 for name in shares)


def test_more_rows_than_there_are_is_refused_with_the_most_that_there_are():
    available = {"a": 60, "b": 500}
    with pytest.raises(
        UserError,
        match=r"mixture.rows: a must give 700 of 1,000 rows, got 60 that "
        r"can be used; set mixture.rows=85 or null",
    ):
        compute_quotas(available, build_mixture(1000, a=0.7, b=0.3))
    assert sum(compute_quotas(available, build_mixture(85, a=0.7, b=0.3)).values()) == 85
    assert sum(compute_quotas(available, build_mixture(a=0.7, b=0.3)).values()) == 85


def test_the_first_of_equal_rows_is_taken_and_the_others_are_counted():
    signs = np.array([5, 3, 5, 9, 3, 1], dtype=np.uint64)
    source = np.array([0, 0, 0, 1, 1, 1])
    rows, dropped = select_rows(signs, source, build_mixture(a=None, b=None))
    assert rows.tolist() == [5, 1, 0, 3]  # in the order of their signs
    assert dropped == {"a": Counter({"a duplicate": 1}), "b": Counter({"a duplicate": 1})}


def test_a_source_whose_rows_are_all_duplicates_is_refused():
    """Its share of 0 rows would leave none of the other sources either."""
    signs = np.array([5, 3, 5, 3], dtype=np.uint64)
    with pytest.raises(UserError, match=r"mixture.sources.b: must have rows that no earlier"):
        select_rows(signs, np.array([0, 0, 1, 1]), build_mixture(a=0.9, b=0.1))


def test_a_share_is_taken_from_the_front_whatever_the_other_sources_hold():
    rng = np.random.default_rng(0)
    ours = rng.integers(0, 2**63, 100).astype(np.uint64)
    taken = []
    for others in (50, 400):
        theirs = rng.integers(0, 2**63, others).astype(np.uint64)
        source = np.repeat([0, 1], [100, others])
        rows, dropped = select_rows(np.concatenate([ours, theirs]), source, build_mixture(40, a=0.5, b=0.5))
        assert dropped["a"] == {"beyond its share": 80}
        taken.append({row for row in rows.tolist() if row < 100})
    assert taken[0] == taken[1] == set(np.argsort(ours)[:20].tolist())


def test_the_shipped_mixture_names_licenses_and_has_both_thinking_modes():
    conf = compose("prepare", PrepareConf, ["mixture=chat"]).mixture
    assert all(source.license and source.share for source in conf.sources.values())
    modes = [source.template["enable_thinking"] for source in conf.sources.values()]
    assert True in modes
    assert False in modes
    assert [True, False] in modes


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MixtureConf(), "mixture.sources: must name at least one source, got none"),
        (lambda: build_mixture(a=1, b=None), "mixture.sources.b.share: must be set for all sources"),
        (lambda: build_mixture(a=0.0), "mixture.sources.a.share: must be a positive number, got 0"),
        (lambda: build_mixture(a="nan"), "mixture.sources.a.share: must be a positive number, got nan"),
        (lambda: build_mixture(5, a=None), "mixture.rows: must be at least 1 and needs sources with"),
        (
            lambda: MixtureConf(sources={"a": SourceConf(path="a", columns={"chat": "x"})}),
            "mixture.sources.a.columns: must map known names to columns of the data, got chat",
        ),
        (
            lambda: MixtureConf(sources={"a": SourceConf(path="")}),
            "mixture.sources.a.path: must name a file, a directory or a dataset, got ''",
        ),
        (
            lambda: MixtureConf(sources={"a": SourceConf(path="a", template={"mode": []})}),
            r"mixture.sources.a.template.mode: must list at least one value, got \[\]",
        ),
    ],
)
def test_a_manifest_that_cannot_work_is_refused(build, message):
    with pytest.raises(UserError, match=message):
        build()

"""The comparison by category counts every run once, and goes on after its last prompt."""

import copy

import pytest

from data.eval_prompts.prompts import EvalPrompt
from models.drafts.ngram import NgramDraft
from models.io.errors import UserError
from scripts.engines import comparison, decoding
from scripts.engines.groups import (
    Run,
    decode_in_batches,
    hold_race,
    load_drafts,
    margin_table,
    read_lines,
    read_runs,
    speed_table,
    tau_table,
)
from tests.support.models.tiny import chain, mixed

NEW = 6


@pytest.fixture
def prompts(learned):
    _, texts = learned
    return [
        EvalPrompt(id=f"q{number}", category=category, ids=text[:5])
        for number, (text, category) in enumerate(zip(texts, ["qa", "rag", "qa"], strict=False))
    ]


@pytest.fixture
def groups(target, prompts, monkeypatch, tmp_path):
    monkeypatch.setenv("ENGINES", str(tmp_path / "nowhere"))
    plain = decoding.endless(copy.deepcopy(target.model))
    ids = [prompt.ids for prompt in prompts]
    lookup = decoding.decoding(
        target, NgramDraft(), chain(4), prompts=ids, new_tokens=NEW, settings=["n-gram", "ours, chain", "4"]
    )
    return [
        comparison.without_draft(target, plain, ids, new_tokens=NEW),
        comparison.Group(draft="n-gram", ours=[lookup], others=[], serve=None),
    ]


def list_contenders(groups):
    return [contender for group in groups for contender in [*group.ours, *group.others]]


def test_a_repeated_command_times_only_the_prompts_that_have_no_line(target, groups, prompts, tmp_path):
    results = tmp_path / "race.jsonl"
    hold_race(groups, target, prompts, results, NEW, [])
    settings, first, second, _ = results.read_text().splitlines(keepends=True)
    results.write_text(settings + first + second[:20])  # truncated by a kill
    hold_race(groups, target, prompts, results, NEW, [])
    assert results.read_text().startswith(settings + first)
    assert [line["prompt"] for line in read_lines(results)[1:]] == ["q0", "q1", "q2"]
    whole = results.read_text()
    hold_race(groups, target, prompts, results, NEW, [])
    assert results.read_text() == whole
    results.write_text(settings + first)
    with pytest.raises(UserError, match=r"--results: must be of this race, got another new_tokens, drafts in "):
        hold_race(groups, target, prompts, results, NEW - 1, ["another"])
    results.write_text(whole)
    table = speed_table(read_runs(results))
    assert table.columns == ["draft", "decoding", "proposed", "qa", "rag", "all", "same answers", "graphs"]
    assert [row[:3] for row in table.rows] == [c.settings for c in list_contenders(groups)]
    assert {tuple(row[-2:]) for row in table.rows} == {("3 of 3", "0")}
    tokens = tau_table(read_runs(results), ["n-gram | ours, chain | 4"])
    assert [row[0] for row in tokens.rows] == ["qa", "rag", "all"]


def test_two_drafts_of_one_method_are_refused(target, learned, tmp_path):
    draft, _ = learned
    for name in "ab":
        draft.save(tmp_path / name, target)
    with pytest.raises(UserError, match=r"^--drafts: must be of different methods, got eagle3, eagle3; "):
        load_drafts(target, [tmp_path / "a", tmp_path / "b"])


def build_run(category, contender, seconds):
    return Run(category=category, contender=contender, seconds=seconds, ids=[1, 2], accepted=[])


def test_a_batch_emits_what_prompts_emit_alone(target, prompts, learned):
    draft, _ = learned
    alone, together = (decode_in_batches(target, [draft], mixed(), prompts, NEW, batch) for batch in (1, 3))
    assert together == alone
    assert {run.contender for run in alone} == {
        "n-gram | ours, chain | 4",
        "eagle3 | ours, chain | 4",
        "eagle3 | ours, tree | 10",
    }


def test_tokens_a_round_are_those_of_all_rounds_and_positions_count_accepted_prefixes():
    rounds = {"qa": [[4, 0], [2]], "rag": [[1, 1, 1]]}
    runs = [
        Run(category=category, contender="ours, chain", seconds=1.0, ids=[], accepted=accepted)
        for category, prompts in rounds.items()
        for accepted in prompts
    ]
    table = tau_table(runs, ["ours, chain"])
    assert [[row[0], row[1][:4], row[2]] for row in table.rows] == [
        ["qa", "3.00", "67 67 33 33"],
        ["rag", "2.00", "100"],
        ["all", "2.50", "83 33 17 17"],
    ]


def test_ours_is_compared_with_the_fastest_other_of_each_category():
    seconds = {"loop": (2.0, 2.0), "lookup": (1.0, 8.0), "draft": (0.5, 1.0)}
    runs = [
        build_run(category, name, times[number])
        for number, category in enumerate(["qa", "rag"])
        for name, times in seconds.items()
    ]
    table = margin_table(runs, ["draft"])
    assert table.rows[:2] == [["qa", "lookup", "2.0", "2.00 [?]"], ["rag", "loop", "1.0", "2.00 [?]"]]
    category, other, speed, margin = table.rows[2]
    assert (category, other, speed, margin[:4]) == ("all", "loop", "1.0", "2.67")

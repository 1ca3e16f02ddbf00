"""Comparing two sides of reports calls noise noise, finds a loss, and says so by its exit code."""

import copy
import json

import numpy as np
import pytest
from scipy import stats

from infer.compare import main
from infer.comparison import metric_changes
from infer.comparison.page import compare_reports as compare_typed_reports
from infer.report.report_files import write_report_files
from models.io.errors import UserError
from tests.support.reports.sample_reports import as_json, build_comparison_report, build_draft_report, from_json


@pytest.fixture(scope="module")
def report():
    """Return the content of a report.json."""
    return as_json(build_draft_report())


def parse_side(reports):
    """Return the reports of one side as they are read from their files; `reports` is one or a list."""
    return [from_json(content) for content in (reports if isinstance(reports, list) else [reports])]


def get_verdict(report, key):
    return report["overall"]["modes"][key]["verdict"]


def rename_draft(report, old, new):
    """Rename a draft in its section and in the keys of its modes."""
    for draft in report["drafts"]:
        draft["name"] = new if draft["name"] == old else draft["name"]
    for section in (report["overall"], *report["per_prompt"]):
        section["modes"] = {
            f"{new}/{key.removeprefix(f'{old}/')}" if key.startswith(f"{old}/") else key: mode
            for key, mode in section["modes"].items()
        }


def compare_reports(before, after):
    return compare_typed_reports(parse_side(before), parse_side(after))


def compare_metrics(before, after):
    return metric_changes.compare_metrics(parse_side(before), parse_side(after))


def change_modes(report, **by_label):
    """Return a copy of the report with the rows of some modes changed by a function."""
    other = copy.deepcopy(report)
    for row in other["per_prompt"]:
        for label, mode in row["modes"].items():
            for part, change in by_label.items():
                if part == "every" or label.endswith(f"/{part}"):
                    change(mode)
    return other


def scale_latency(factor):
    """Return a function that scales a mode's latencies behind the first token."""

    def change(mode):
        mode["e2e_ms"] = mode["ttft_ms"] + factor * (mode["e2e_ms"] - mode["ttft_ms"])

    return change


def measure_on_noisy_machine(report, rng):
    """Return the report as measured on a machine that is slower and faster from prompt to prompt."""
    return change_modes(report, every=lambda mode: scale_latency(rng.lognormal(0, 0.1))(mode))


def measure_runs(report, rng, *, runs=3, spread=0.06, **factors):
    """Return the report as measured in several runs: each mode of a run is faster or slower as a whole."""
    return [
        change_modes(
            report,
            **{
                part: scale_latency(factors.get(part, 1.0) * rng.lognormal(0, spread))
                for part in ("untrained", "chain", "tree")
            },
        )
        for _ in range(runs)
    ]


def accept_fewer(mode):
    lost = mode["accepted"] // 4
    mode["rounds"] += lost // 2
    mode["accepted"] -= lost


def list_directions(before, after):
    return {
        (move.mode, move.metric): move.is_beyond_noise and np.sign(move.after - move.before)
        for move in compare_metrics(before, after)
    }


def get_tree_speed_interval(before, after):
    moves = {(move.mode, move.metric): move for move in compare_metrics(before, after)}
    return moves["draft/tree", "speed-up"].interval


def test_a_report_beside_itself_has_not_moved(report):
    settings, table, regressions = compare_reports(report, report)
    assert settings == regressions == []
    assert not any(list_directions(report, report).values())
    assert {row[0] for row in table.rows} == {"autoregressive", "ngram", "draft/untrained", "draft/chain", "draft/tree"}


def test_a_worse_draft_is_a_regression_of_its_mode_alone(report):
    after = change_modes(report, tree=accept_fewer)
    assert compare_reports(report, after)[2] == ["draft/tree tau"]
    directions = list_directions(report, after)
    assert (directions["draft/tree", "tau"], directions["draft/tree", "acceptance rate"]) == (-1, -1)
    assert not directions["draft/chain", "tau"]
    assert list_directions(after, report)["draft/tree", "tau"] == 1
    assert compare_reports(after, report)[2] == []


@pytest.mark.parametrize("part", ["chain", "tree", "every"])
def test_other_latencies_of_the_same_tokens_are_no_regression(report, part):
    """With one run on each side, nobody knows what the next run of the same would have measured."""
    after = change_modes(report, **{part: scale_latency(1.3)})
    _, table, regressions = compare_reports(report, after)
    assert regressions == []
    assert "Speed is shown and not judged" in table.note
    timed = [row for row in table.rows if row[1] in ("speed-up", "tokens/s")]
    assert {row[-1] for row in timed} == {"unknown"}
    assert all(row[4].endswith("[?]") for row in timed)


def test_a_slower_mode_loses_speedup_where_runs_are_repeated_and_a_slower_machine_does_not(report):
    after = change_modes(report, chain=scale_latency(1.1))
    assert compare_reports([report] * 2, [after] * 2)[2] == ["draft/chain speed-up"]
    machine = change_modes(report, every=scale_latency(1.1))
    assert compare_reports([report] * 2, [machine] * 2)[2] == []
    assert list_directions([report] * 2, [machine] * 2)["draft/chain", "tokens/s"] == -1


def test_noise_alone_is_rarely_called_a_regression(report):
    """Two equal runs of a side leave the noise between prompts alone."""
    rng = np.random.default_rng(0)
    sides = [[[measure_on_noisy_machine(report, rng)] * 2 for _ in range(2)] for _ in range(30)]
    assert sum(bool(compare_reports(*each)[2]) for each in sides) <= 3


@pytest.mark.parametrize("runs", [2, 3])
def test_runs_that_differ_as_a_whole_are_rarely_called_a_regression(report, runs):
    """Such runs differ as on a shared machine; a single run for several would often be called a regression."""
    rng = np.random.default_rng(runs)
    sides = [[measure_runs(report, rng, runs=runs) for _ in range(2)] for _ in range(10)]
    assert sum(bool(compare_reports(*each)[2]) for each in sides) <= 1
    single = [compare_reports([old[0]] * 2, [new[0]] * 2)[2] for old, new in sides]
    assert sum(map(bool, single)) > 5


def test_the_interval_of_several_runs_holds_the_noise_between_them(report):
    """Compute Welch's interval by hand: with equal runs it is that of prompts, here nothing, else that of the runs."""
    steady, factors = [report] * 3, (1.0, 1.2, 1.5)
    shaky = [change_modes(report, tree=scale_latency(factor)) for factor in factors]
    assert get_tree_speed_interval(steady, steady) == pytest.approx([0, 0])
    low, high = get_tree_speed_interval(shaky, shaky)
    measured = from_json(report).overall.modes["eagle3-demo/tree"].figures.speedup.mean
    variance = np.var([measured / factor for factor in factors], ddof=1) / 3
    quantile = stats.t.ppf(1 - 0.05 / 8 / 2, df=4)  # tau and speed-up of four modes
    assert high == pytest.approx(quantile * np.sqrt(2 * variance))
    assert low == pytest.approx(-high)


def test_a_loss_of_speed_beyond_the_noise_between_runs_is_found(report):
    rng = np.random.default_rng(0)
    before = measure_runs(report, rng, spread=0.02)
    after = measure_runs(report, rng, spread=0.02, chain=1.5)
    _, table, regressions = compare_reports(before, after)
    assert regressions == ["draft/chain speed-up"]
    assert "the noise between prompts and between runs" in table.note
    assert compare_reports(after, before)[2] == []


def test_each_report_of_the_later_side_must_hold_what_the_first_held(report):
    wrong, less = copy.deepcopy(report), copy.deepcopy(report)
    get_verdict(wrong, "eagle3-demo/chain")["lossless"] = "no"
    del less["overall"]["modes"]["ngram"]
    less["setup"]["device"]["threads"] = 4
    settings, _, regressions = compare_reports([report] * 2, [report, wrong, less])
    assert regressions == ["draft/chain lossless: no", "ngram is no longer measured"]
    assert "device.threads: 2 -> 4" in settings


def test_reports_of_other_prompts_are_refused_on_either_side(report):
    other, reordered = copy.deepcopy(report), copy.deepcopy(report)
    other["setup"]["prompts"]["sha256"] = "1" * 64
    reordered["per_prompt"].reverse()
    for before, after, place in [
        (report, other, "2 of 2"),
        (report, reordered, "2 of 2"),
        ([report, other], [report] * 2, "2 of 4"),
        (report, [report, other], "3 of 3"),
        ([report] * 2, [other] * 2, "3 of 4"),
    ]:
        with pytest.raises(UserError) as error:
            compare_reports(before, after)
        assert str(error.value) == (
            f"report: must hold the prompts of the first report, got others in number {place}; "
            "measure again with one evaluation.prompts"
        )


def test_settings_of_the_measurement_are_compared_key_by_key(report):
    after = copy.deepcopy(report)
    after["setup"]["versions"] = {"torch": "2.14.0"}
    after["setup"]["device"]["threads"] = 4
    assert compare_reports(report, after)[0] == [
        "device.threads: 2 -> 4",
        "versions.torch: 2.13.0 -> 2.14.0",
        "versions.transformers: 5.23.0 -> absent",
    ]


def test_a_mode_that_is_no_longer_measured_is_a_regression(report):
    after = copy.deepcopy(report)
    modes = after["overall"]["modes"]
    del modes["ngram"], modes["eagle3-demo/untrained"]
    after["drafts"][0]["not_measured"]["untrained"] = "the checkpoint holds no config"
    _, table, regressions = compare_reports(report, after)
    assert regressions == [
        "ngram is no longer measured",
        "draft/untrained is no longer measured (the checkpoint holds no config)",
    ]
    rows = [row for row in table.rows if row[0] in ("ngram", "draft/untrained")]
    assert [row[1:4] for row in rows] == [["measured", "yes", "NO"]] * 2
    for known in (after, report):  # a mode that was not measured before cannot be lost
        assert compare_reports(after, known)[2] == []
    del modes["eagle3-demo/tree"]
    assert "draft/tree is no longer measured" in compare_reports(report, after)[2]


def test_a_mode_that_lost_its_figures_is_a_regression(report):
    """A broken template or end token ends every answer with its first token: no round is left to measure."""
    after = copy.deepcopy(report)
    after["overall"]["modes"]["eagle3-demo/tree"]["figures"]["acceptance_length"] = None
    expected = ["draft/tree is no longer measured (no answer took a round)"]
    assert compare_reports(report, after)[2] == expected
    assert compare_reports(after, after)[2] == compare_reports(after, report)[2] == []


def test_a_draft_that_is_gone_or_renamed_among_others_is_a_regression(report):
    before = as_json(build_comparison_report())
    after = copy.deepcopy(before)
    rename_draft(after, "usual", "new")
    assert compare_reports(before, after)[2] == [
        f"usual/{mode} is no longer measured" for mode in ("untrained", "chain", "tree")
    ]
    target_modes = {key: report["overall"]["modes"][key] for key in ("autoregressive", "ngram")}
    alone = {**report, "drafts": [], "overall": {**report["overall"], "modes": target_modes}}
    assert compare_reports(report, alone)[2] == [
        f"eagle3-demo/{mode} is no longer measured" for mode in ("untrained", "chain", "tree")
    ]


def test_a_draft_called_like_a_mode_is_not_taken_for_it(report):
    after = copy.deepcopy(report)
    rename_draft(after, "eagle3-demo", "n")
    assert compare_reports(report, after)[2] == []
    assert ("ngram", "tau") in list_directions(report, after)


def test_the_command_prints_and_exits_for_a_ci(report, tmp_path, capsys):
    after = change_modes(report, tree=accept_fewer)
    get_verdict(after, "eagle3-demo/chain")["lossless"] = "no"
    for name, content in (("a", report), ("b", after)):
        write_report_files(from_json(content), tmp_path / name)
    assert main([str(tmp_path / "a"), str(tmp_path / "a/report.json")]) == 0
    shown = capsys.readouterr().out
    assert "settings: all the same" in shown
    assert "no regression beyond noise" in shown
    assert main([str(tmp_path / "a/report.json"), str(tmp_path / "b/report.json")]) == 1
    shown = capsys.readouterr().out
    assert "regression: draft/tree tau; draft/chain lossless: no" in shown
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["fast", "slow"], 0),
        (["fast", "--", "slow"], 0),
        (["fast", "fast", "--", "slow", "slow"], 1),
        (["slow", "slow", "--", "fast", "fast"], 0),
    ],
)
def test_the_command_line_names_the_sides(report, tmp_path, monkeypatch, words, code):
    monkeypatch.chdir(tmp_path)
    for name, content in (("fast", report), ("slow", change_modes(report, tree=scale_latency(1.2)))):
        (tmp_path / name).write_text(json.dumps(content))
    assert main(words) == code


@pytest.mark.parametrize("verdict", ["no", "undecided"])
def test_only_the_verdict_yes_passes_in_modes_and_batches_whatever_it_was_before(report, verdict):
    after = copy.deepcopy(report)
    get_verdict(after, "eagle3-demo/chain")["lossless"] = verdict
    after["drafts"][0]["batches"][0]["verdict"]["lossless"] = verdict
    regressions = [f"draft/chain lossless: {verdict}", f"draft/tree, batch 4 lossless: {verdict}"]
    assert compare_reports(report, after)[2] == regressions
    assert compare_reports(after, after)[2] == regressions
    assert compare_reports(after, report)[2] == []


def test_a_lossy_rule_passes_only_beside_a_lossy_one():
    comparison = as_json(build_comparison_report())
    exact = copy.deepcopy(comparison)
    lossy = comparison["drafts"][2]["name"]
    for mode in ("untrained", "chain", "tree"):
        get_verdict(exact, f"{lossy}/{mode}").update(verification="greedy", lossy=False, lossless="yes")
    assert compare_reports(comparison, comparison)[2] == []
    assert compare_reports(exact, comparison)[2] == [
        f"{lossy}/{mode} lossless: no" for mode in ("untrained", "chain", "tree")
    ]


def test_a_file_that_is_no_report_is_refused_in_one_line(report, tmp_path, read_refusal):
    good, old, cut = (tmp_path / name for name in ("good.json", "old.json", "cut.json"))
    good.write_text(json.dumps(report))
    old.write_text(json.dumps({**report, "schema_version": 1}))
    cut.write_text("{")
    for arguments, message in [
        ([good], "command line: must be two reports, or several of each side with -- between the "),
        ([good, good, good], "command line: must be two reports, or several of each side with "),
        ([good, good, "--"], "command line: must be two reports, or several of each side with "),
        ([good, "--", good, "--", good], "command line: must be two reports, or several of each"),
        ([good, old], f"report: must be of schema version 5, got 1 in {old}; measure again"),
        ([good, cut], f"report: must be a readable report.json, got {cut}; python -m"),
        ([good, tmp_path / "none"], "report: must be a readable report.json, got"),
    ]:
        line = read_refusal(lambda words=arguments: main([str(word) for word in words]))
        assert line.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("per_prompt",), None, "per_prompt: Field required in"),
        (("setup", "prompts", "sha256"), None, "setup.prompts.sha256: Field required in"),
        (("overall", "modes", "ngram", "verdict"), None, "overall.modes.ngram.verdict: Field req"),
        (("per_prompt", 5, "modes", "ngram"), None, "no 'ngram' in"),
        (("per_prompt",), [], "per_prompt: List should have at least 1 item"),
        (("drafts",), 5, "drafts: Input should be a valid list"),
        (("setup", "device"), "cpu", "setup.device: Input should be a dictionary"),
    ],
)
def test_a_report_that_lacks_something_is_refused_in_one_line(report, tmp_path, read_refusal, path, value, message):
    other = copy.deepcopy(report)
    *outer, key = path
    section = other
    for part in outer:
        section = section[part]
    del section[key]
    if value is not None:
        section[key] = value
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(report))
    bad.write_text(json.dumps(other))
    line = read_refusal(lambda: main([str(good), str(bad)]))
    start = "error: report: must match docs/report.schema.json, got "
    assert line.startswith(start + message)
    assert f"in {bad}; measure again" in line

"""Long work reports its progress in lines where no bar can be shown."""

import time

from models.io import console


def test_work_without_a_terminal_prints_a_line_with_the_time_left(monkeypatch, caplog):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(console, "SHOWS_BARS", False)
    caplog.set_level("INFO")
    for item in console.track_progress(["a", "b", "c", "d"], "prompts"):
        now += 4.0 if item == "a" else 8.0
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["prompts 2/4  0:00:12 left"]


def test_the_first_item_of_a_batch_gives_no_time_left(monkeypatch, caplog):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(console, "SHOWS_BARS", False)
    caplog.set_level("INFO")
    for total in (200, 4):
        for item in console.track_progress(range(total), "answers"):
            now += 11.0 if item in (0, total // 2 - 1) else 0.0
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["answers 1/200", "answers 100/200  0:00:22 left", "answers 1/4", "answers 2/4  0:00:22 left"]


def test_work_of_unknown_length_passes_unchanged(monkeypatch):
    monkeypatch.setattr(console, "SHOWS_BARS", False)
    assert [*console.track_progress(iter("ab"), "prompts")] == ["a", "b"]


def test_a_line_is_printed_as_it_is(capsys):
    """Rich would take brackets for styles and colons for pictures."""
    for line in ("report: runs/a[v2]/report.html", "x[/red].jsonl", "12:smile:30"):
        console.print_line(line)
        assert capsys.readouterr().out == f"{line}\n"

"""Long work says how far it is by all that this run did, however its rows come."""

import time

from data.progress import RowProgress


def test_rows_that_come_many_at_once_leave_as_much_time_as_others(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with RowProgress("answers", total=100, already_done=20) as progress:
        now = 60.0
        for _ in range(4):
            progress.count(done=1, tokens=30)
        assert progress.tasks[0].description == "0.1 rows/s  2 tokens/s  0:19:00 left"
        progress.count(failed=1)
        assert progress.tasks[0].description == "0.1 rows/s  2 tokens/s  1 failed  0:18:45 left"


def test_before_the_first_rows_the_time_left_is_that_of_the_longest_answers(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with RowProgress("answers", total=200, longest=50) as progress:
        now = 100.0
        progress.count(prompts=32, tokens=1000)
        assert progress.tasks[0].description == (
            "32 prompts read, 1,000 tokens so far  10 tokens/s  "
            "0:15:00 left if answers take 50 tokens each"
        )
        progress.count(done=4)
        assert progress.tasks[0].description == "0.0 rows/s  10 tokens/s  1:21:40 left"

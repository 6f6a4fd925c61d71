"""What a person sees while data is prepared."""

import io

from rich.console import Console

from skipless.terminal import train_view


def test_a_long_stage_says_how_far_it_is(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(train_view.time, "perf_counter", lambda: now[0])
    out = io.StringIO()
    view = train_view.TrainView(Console(file=out))
    for seconds, done in ((0.0, 0), (1.0, 2e6), (7.0, 9e6), (8.0, 1e7)):
        now[0] = seconds
        view.data("tokenise", int(done), 31_000_000)
    assert out.getvalue().splitlines() == ["data: tokenise", "data: tokenise, 9 of 31 MB"]

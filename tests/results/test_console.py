import io
from pathlib import Path

import pytest
from rich.console import Console

from autotune.problem.hardware import detect
from autotune.results.console import LiveObserver, make_observer
from tests.conftest import Terminal, make_candidate
from tests.studies import study_of_every_kind


def test_a_pipe_into_which_colours_are_forced_has_no_live_view() -> None:
    """A small panel four times a second is 230 MB a day of a CI's log."""
    piped = make_observer(detect("cpu", 2), 60.0, Console(force_terminal=True, file=io.StringIO()), quiet=False)
    assert not isinstance(piped, LiveObserver)


def test_the_live_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    study = study_of_every_kind(tmp_path)
    console = Console(force_terminal=True, width=120, record=True, file=Terminal())
    hardware = detect("cpu", 2)
    live = make_observer(hardware, 60.0, console, quiet=False)
    assert isinstance(live, LiveObserver)
    live.start()
    live.trial_started(0, make_candidate(), "search", "")
    live.phase("forward")
    for record in study.records():
        assert record.outcome is not None
        live.trial_finished(record.number, record.candidate, record.role, record.outcome)
    live.clock(1.0, 60.0)
    live.say("hello")
    console.print(live._render())
    live.stop()
    text = console.export_text()
    assert "best  z0" in text
    assert "oom_device 1" in text
    assert "hello" in text
    quiet = make_observer(hardware, 60.0, console, quiet=True)
    quiet.start()
    quiet.say("nothing")
    quiet.stop()

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from autotune.problem.hardware import detect
from autotune.problem.outcome import Outcome, OutcomeKind
from autotune.results.console import LiveObserver, PlainObserver, make_observer, show_study, trials_table
from autotune.results.tables import DataTable
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


TEXTS = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. can't allocate memory",
    "[/pytorch/gloo/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:34",
    "[rank0]: RuntimeError :warning: [red]x[/]",
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("running", [True, False])
def test_what_an_error_says_is_shown_as_it_is(tmp_path: Path, text: str, running: bool) -> None:
    study = study_of_every_kind(tmp_path)
    first = study.records()[0]
    crashed = None if running else Outcome(OutcomeKind.CRASH, reason=text)
    study.note_skips({text: 1})
    out = io.StringIO()
    console = Console(file=out, width=400)
    console.print(trials_table([dataclasses.replace(first, note=text, outcome=crashed)]))
    assert text in out.getvalue()
    show_study(study, console)
    assert f"not tried (1): {text}" in out.getvalue()
    PlainObserver(console).trial_finished(7, first.candidate, "search", Outcome(OutcomeKind.CRASH, reason=text))
    assert text in out.getvalue().splitlines()[-1]
    live = LiveObserver(console, detect("cpu", 2), 60.0)
    live.trial_finished(7, first.candidate, "search", Outcome(OutcomeKind.CRASH, reason=text))
    console.print(live._render())
    assert text in out.getvalue().splitlines()[-2]


def test_rows_of_a_table_are_data_in_every_column() -> None:
    table = DataTable("a", "b")
    table.add_row(TEXTS[2], ":100: [b]x[/b]")
    out = io.StringIO()
    Console(file=out, width=400).print(table)
    assert TEXTS[2] in out.getvalue()
    assert ":100: [b]x[/b]" in out.getvalue()

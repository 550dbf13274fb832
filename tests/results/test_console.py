import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from autotune.problem.hardware import detect
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase
from autotune.results.console import (
    LiveObserver,
    PlainObserver,
    make_observer,
    outcome_line,
    shortened,
    show_study,
    trials_table,
)
from autotune.search.leaderboard import Leaderboard
from autotune.search.trials import Record
from autotune.util.streams import Command, folded
from autotune.util.units import MIB
from tests.conftest import Terminal, make_candidate, make_job
from tests.studies import study_of_every_kind


def test_a_pipe_into_which_colours_are_forced_has_no_live_view() -> None:
    """A small panel four times a second is 230 MB a day of a CI's log."""
    piped = make_observer(Console(force_terminal=True, file=io.StringIO()), quiet=False)
    assert not isinstance(piped, LiveObserver)


def test_the_live_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    study = study_of_every_kind(tmp_path)
    console = Console(force_terminal=True, width=120, record=True, file=Terminal())
    live = make_observer(console, quiet=False)
    assert isinstance(live, LiveObserver)
    with live:
        live.begin_study(lambda: Leaderboard(study.records(), detect("cpu", 2), make_job()))
        live.start(60.0, 1.0)
        live.trial_started(0, make_candidate(), "search", "")
        live.phase("forward")
        for record in study.records():
            assert record.outcome is not None
            live.trial_finished(record.number, record.candidate, record.role, record.outcome)
        live.print_line("hello")
        console.print(live._render())
    text = console.export_text()
    assert "best  z0" in text
    assert "OOM 1" in text
    assert "━" in text, "the bar of the budget"
    assert "hello" in text
    with make_observer(console, quiet=True) as quiet:
        quiet.start(60.0, 0.0)
        quiet.print_line("nothing")


def test_a_trial_that_cannot_win_says_why_in_its_line_and_is_not_the_best_so_far() -> None:
    console = Console(force_terminal=True, width=200, file=io.StringIO())
    hardware = detect("cpu", 2)
    live = LiveObserver(console)
    records = list[Record]()
    live.begin_study(lambda: Leaderboard(records, hardware, make_job()))
    slow = Outcome(OutcomeKind.OK, measurement=Measurement(1.0, 0.01, 5, 8.0, 8.0, 300 * MIB))
    over = int(8.7 * MIB) + hardware.ceiling_bytes
    fast = Outcome(OutcomeKind.OK, measurement=Measurement(1.0, 0.01, 5, 99.0, 99.0, over))
    for number, (size, outcome) in enumerate(((1, slow), (64, fast))):
        records.append(Record(number, make_candidate(0, size), outcome, "search"))
        live.trial_finished(number, make_candidate(0, size), "search", outcome)
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert "over by 8.7 MiB" in out.splitlines()[1]
    assert "\x1b[2m" in out.splitlines()[1], "dimmed"
    assert "\x1b[2m" not in out.splitlines()[0]
    console.print(live._render())
    assert f"best  {make_candidate(0, 1)}" in console.file.getvalue()  # type: ignore[attr-defined]


def test_lines_of_failures_are_short_and_no_number_is_cut() -> None:
    out = Outcome(OutcomeKind.OOM_DEVICE, Phase.BACKWARD, evidence="x" * 500, missing_bytes=16 * MIB)
    assert outcome_line(out) == "OOM in backward, 16.0 MiB short"
    assert (
        outcome_line(dataclasses.replace(out, kind=OutcomeKind.OOM_HOST, missing_bytes=None)) == "host OOM in backward"
    )
    numbers = Outcome(OutcomeKind.CRASH, reason=" ".join(str(10**8 + at) for at in range(99)))
    words = outcome_line(numbers).removesuffix(" …").split()[3:]
    assert words == numbers.reason.split()[: len(words)]
    assert len(words) > 5
    assert len(shortened("y" * 999, 100)) <= 100


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
    console.print(trials_table([dataclasses.replace(first, note=text, outcome=crashed)], study.facts()))
    assert text in out.getvalue()
    show_study(study, console)
    assert f"not tried (1): {text}" in out.getvalue()
    PlainObserver(console).trial_finished(7, first.candidate, "search", Outcome(OutcomeKind.CRASH, reason=text))
    assert text in out.getvalue().splitlines()[-1]
    live = LiveObserver(console)
    live.trial_finished(7, first.candidate, "search", Outcome(OutcomeKind.CRASH, reason=text))
    console.print(live._render())
    assert text in out.getvalue().splitlines()[-2]


def test_show_ends_with_the_bound_that_the_last_call_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study, bound = study_of_every_kind(tmp_path), "untried configs are at most 3 % faster"
    study.begin_call(60.0)
    study.update_call(33.0, "budget used", bound)
    show_study(study, Console(file=(out := io.StringIO())))
    assert f"; {bound}\n" in out.getvalue()
    monkeypatch.setenv("COLUMNS", "30")
    show_study(study, Console(file=(out := Terminal())))
    assert "untried configs\n    are at most 3 % faster\n" in out.getvalue(), "folded at words"
    assert folded(Command("a " * 30), out) == "a " * 30, "a command stays whole"

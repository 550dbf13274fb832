"""A budget that ends during start-up ends the start-up."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from autotune.commands.script_probe import StartupDeadline
from autotune.errors import NoWinner, Stopped
from autotune.executors.machine import Ops
from autotune.predict.trace import _outputs


class Machine:
    """An executor's clock and ops."""

    def __init__(self) -> None:
        self.time, self.ops = 0.0, Ops(lambda text: None)

    def now(self) -> float:
        return self.time


def at(seconds: float, build_seconds: float = 0.0) -> StartupDeadline:
    machine, deadline = Machine(), StartupDeadline(12.0)
    deadline.begin(machine, 0.0)  # type: ignore[arg-type]
    machine.time, machine.ops.build_seconds = seconds, build_seconds
    return deadline


def test_a_budget_that_ends_in_startup_is_said_with_a_larger_one() -> None:
    with (
        pytest.raises(NoWinner, match=r"start-up took 12.0 s.*budget of 12.0 s; use --budget 1m"),
        at(12.5).ended(without_trial=True),
    ):
        raise Stopped("stopped")
    with at(12.5).ended(without_trial=False):
        raise Stopped("stopped")


@pytest.mark.parametrize(("seconds", "build_seconds"), [(11.0, 0.0), (20.0, 9.0)])
def test_a_user_who_stops_within_the_budget_is_no_budget(seconds: float, build_seconds: float) -> None:
    """Builds of DeepSpeed's ops do not count."""
    for way in (
        at(seconds, build_seconds).ended(without_trial=True),
        at(seconds, build_seconds).ended(without_trial=False),
    ):
        with pytest.raises(Stopped), way:
            raise Stopped("stopped")


def test_a_build_that_goes_on_counts_as_one() -> None:
    ops = Ops(lambda text: None)
    ops._report({"state": "building", "op": "CPUAdamBuilder", "last_seconds": None})
    time.sleep(0.02)
    assert ops.all_build_seconds >= 0.02
    ops._report({"state": "done", "op": "CPUAdamBuilder", "built": True, "seconds": 0.02})
    assert ops.all_build_seconds == 0.02
    with pytest.raises(Stopped):
        ops._load(SimpleNamespace(load_ops=stopped_while_building), [])  # type: ignore[arg-type]
    assert ops.all_build_seconds >= 0.03, "a stopped build counts, too"


def stopped_while_building(names: list[str], report: object) -> None:
    report({"state": "building", "op": "CPUAdamBuilder", "last_seconds": None})  # type: ignore[operator]
    time.sleep(0.02)
    raise Stopped("stopped")


@pytest.mark.timeout(300)  # the tracer sleeps longer
def test_a_trace_ends_with_the_budget() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(3600)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as tracing:
        _, why = _outputs(tracing, "", 3600.0, lambda: True)
        tracing.kill()
    assert why == "no trace before the end of the budget"

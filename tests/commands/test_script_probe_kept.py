"""A first run of a script that is measured is not run again if its call ends in the checks after it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.commands import script_probe
from autotune.commands.script_probe import Probe, StartupDeadline, probe
from autotune.errors import Stopped
from autotune.problem.hardware import detect
from autotune.problem.job import Script
from autotune.problem.outcome import Outcome
from tests.results.report.studies import measured


def test_a_measured_first_run_is_kept_and_the_next_call_goes_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("first")
    script, ran, checked = Script(("train.py",), str(tmp_path)), list[str](), list[tuple[Outcome, dict[str, Any]]]()
    executor: Any = SimpleNamespace(
        hardware=detect("cpu", 2), now=lambda: 0.0, ops=SimpleNamespace(all_build_seconds=0.0)
    )
    mine = measured(40, 3)

    def first_run(*_: object) -> tuple[Outcome, dict[str, Any]]:
        ran.append("first run")
        return mine, {"micro_batch": 4}

    def checks(executor: object, script: Script, baseline: Outcome, facts: dict[str, Any], *_: object) -> Probe:
        checked.append((baseline, facts))
        if len(checked) != 2:
            raise Stopped("the budget has ended")
        return Probe(script, baseline, "all")

    monkeypatch.setattr(script_probe, "_run_with_ops", first_run)
    monkeypatch.setattr(script_probe, "_checked", checks)
    said: list[str] = []
    with pytest.raises(Stopped):
        probe(executor, script, tmp_path, StartupDeadline(60.0), said.append)
    assert "40 samples/s" in said[-1]
    found = probe(executor, script, tmp_path, StartupDeadline(60.0), said.append)
    assert ran == ["first run"]
    assert checked[1] == (mine, {"micro_batch": 4})
    script_probe.remember(found, tmp_path)
    (tmp_path / script_probe.MEMORY).unlink()
    with pytest.raises(Stopped):
        probe(executor, script, tmp_path, StartupDeadline(60.0), said.append)
    assert len(ran) == 2, "the study has its findings"
    (tmp_path / "train.py").write_text("edited")
    with pytest.raises(Stopped):
        probe(executor, script, tmp_path, StartupDeadline(60.0), said.append)
    assert len(ran) == 3, "the script was edited"


def test_ops_built_in_the_first_run_use_up_no_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("first")
    ops = SimpleNamespace(all_build_seconds=30.0)
    executor: Any = SimpleNamespace(hardware=detect("cpu", 2), clock=70.0, ops=ops)
    executor.now = lambda: executor.clock
    limits, left = list[float](), list[float]()

    def first_run(executor: Any, candidate: object, name: str, seconds: float) -> tuple[Outcome, Any]:
        limits.append(seconds)
        executor.clock += 120.0  # of which 100 for builds
        ops.all_build_seconds += 100.0
        return measured(40, 3), {"micro_batch": 4}

    def checks(
        executor: object, script: Script, baseline: Outcome, facts: object, key: object, budget: Any, _: object
    ) -> Probe:
        left.append(budget.left_seconds)
        return Probe(script, baseline, "all")

    monkeypatch.setattr(script_probe, "_run_with_ops", first_run)
    monkeypatch.setattr(script_probe, "_checked", checks)
    budget = StartupDeadline(60.0)
    budget.begin(executor, 30.0)  # 10 s ago, without builds
    probe(executor, Script(("train.py",), str(tmp_path)), tmp_path, budget, lambda line: None)
    assert limits == [50.0]
    assert left == [30.0]

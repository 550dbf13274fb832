"""An op of DeepSpeed's that a script is first seen to need in its own run."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.commands.script_probe import FIRST_SHARE, _refuse_unless_run, _run_with_ops
from autotune.errors import MachineError, ScriptFails
from autotune.executors.base import MeasureSpec
from autotune.executors.local import LocalExecutor
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.job import Script, ScriptProfile
from autotune.problem.outcome import Outcome, OutcomeKind, Phase, Source
from autotune.script.profile import unknown_job
from tests.conftest import make_job


class Session:
    def __init__(self, executor: "Executor") -> None:
        self.executor, self.facts, self.missing_op = executor, {"trains": True}, ""

    def measure(self, candidate: Candidate, measure_spec: MeasureSpec, seconds: float) -> Outcome:
        self.executor.limits.append(seconds)
        self.executor.clock += 7.0
        needs = [name for name in self.executor.needs if name not in self.executor.tried_ops]
        self.missing_op = needs[0] if needs else ""
        failed = Outcome(OutcomeKind.CRASH, reason="not built", source=Source.EXCEPTION)
        return failed if needs else Outcome(OutcomeKind.OOM_DEVICE, reason="so that it counts")

    def close(self) -> None:
        pass


class Executor:
    """Whose script needs two ops, one of which cannot be built."""

    def __init__(self) -> None:
        self.job, self.needs, self.tried_ops = make_job(), ["FusedAdamBuilder", "OtherBuilder"], set[str]()
        self.clock, self.limits = 100.0, list[float]()
        self.ops = SimpleNamespace(failed={"OtherBuilder": "no compiler"})

    def now(self) -> float:
        return self.clock

    def session(self, *_: Any, job: None) -> Session:
        return Session(self)

    def load_ops(self, candidates: list[Candidate], *names: str, job: None) -> None:
        assert not candidates
        self.tried_ops |= set(names)
        self.clock += 50.0


def test_each_is_built_between_two_starts_and_once() -> None:
    executor: Any = Executor()
    outcome, facts = _run_with_ops(executor, Candidate(()), "probe", 60.0 / FIRST_SHARE)
    assert outcome.reason == "so that it counts"
    assert facts == {"trains": True, "ops": ["FusedAdamBuilder"]}, "what cannot be built is not asked for again"
    assert executor.limits == pytest.approx([60.0, 60.0, 53.0]), (
        "builds do not count, nor does the first start that was in vain"
    )


class Ground:
    """Where ranks would run; remembers what it was asked to load."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def load_ops(self, names: list[str]) -> bool:
        self.asked.append(names)
        return True

    def is_shared_path(self, path: Path) -> bool:
        return False


def test_what_was_seen_is_loaded_by_every_later_call_too(hardware: Hardware, tmp_path: Path) -> None:
    ground: Any = Ground()
    script = Script(("train.py",), str(tmp_path))
    executor = LocalExecutor(unknown_job(script, hardware), hardware, tmp_path / "study", [], target=ground)
    executor.load_ops([], "FusedLionBuilder")
    with_ops = replace(script, profile=ScriptProfile(ops=["FusedAdamBuilder"]))
    job = replace(executor.job, script=with_ops)
    executor.load_ops([], job=job)
    first, second = ground.asked
    assert "FusedLionBuilder" in first
    assert set(second) == {*first, "FusedAdamBuilder"}
    session = executor.session(Candidate(()), "probe", job=job)
    assert session._spec()["ops"] == second, "a rank need not leave for these"
    session._process(1, {"type": "unbuilt", "op": "EvoformerAttnBuilder"})
    assert session.missing_op == "EvoformerAttnBuilder", "any rank may be the one"


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("RuntimeError: Error building extension 'cpu_adam': [1/3] c++", MachineError),
        ("RuntimeError: Unable to JIT load the cpu_adam op due to hardware/software issue.", MachineError),
        ("ValueError: its own", ScriptFails),
    ],
)
def test_an_op_that_cannot_be_built_is_no_fault_of_the_script(
    reason: str, error: type[Exception], hardware: Hardware, tmp_path: Path
) -> None:
    job = unknown_job(Script(("train.py",), str(tmp_path)), hardware)
    ops = SimpleNamespace(failed={"CPUAdamBuilder": "ld: cannot find -ltorch"})
    executor: Any = SimpleNamespace(job=job, hardware=hardware, ops=ops)
    outcome = Outcome(OutcomeKind.CRASH, Phase.INIT, reason=reason, exceptions=("builtins.RuntimeError",))
    budget: Any = SimpleNamespace(seconds=60.0)
    with pytest.raises(error) as caught:
        _refuse_unless_run(executor, outcome, {}, 60.0, budget)
    said = (
        "the script needs an op that cannot be built: DeepSpeed's CPUAdam (ld: cannot find -ltorch); `autotune doctor`"
    )
    assert (said in str(caught.value)) is (error is MachineError)

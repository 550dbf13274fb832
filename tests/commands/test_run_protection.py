"""Agreement to run a script on a machine that cannot protect the user's files."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.commands.doctor import _protection
from autotune.commands.run import check_protection
from autotune.commands.script_probe import Probe, ShortRuns, after_probe, check_batch
from autotune.errors import UserError
from autotune.executors import machine
from autotune.problem.hardware import detect
from autotune.problem.job import Job, Script, ScriptProfile
from autotune.rank.sandbox import Protection
from autotune.util.interpreter import OWN
from tests.conftest import make_job, make_setup
from tests.results.report.studies import measured


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Protection], None]:
    """Has this machine offer one protection."""
    return lambda protection: monkeypatch.setattr(machine, "_available", lambda *_: protection)


@dataclass
class Setup:
    """The fields of a Setup that matter here."""

    job: Job
    runs_ranks: bool = True
    nodes: None = None


@pytest.fixture
def setup(tmp_path: Path) -> Any:
    job = replace(make_job(), script=Script(("train.py",), str(tmp_path)))
    return Setup(job)


def test_without_protection_it_needs_the_option(
    setup: Any, tmp_path: Path, offer: Callable[[Protection], None]
) -> None:
    for protection in (Protection.OVERLAY, Protection.LANDLOCK):
        offer(protection)
        check_protection(setup, tmp_path, print)
    offer(Protection.NONE)
    with pytest.raises(UserError, match="--unprotected"):
        check_protection(setup, tmp_path, print)
    setup.job = replace(setup.job, unprotected=True)
    check_protection(setup, tmp_path, print)


def test_a_named_model_needs_none_but_remote_code_does(tmp_path: Path, offer: Callable[[Protection], None]) -> None:
    offer(Protection.NONE)
    check_protection(Setup(make_job()), tmp_path, print)
    remote = replace(make_job(), model=replace(make_job().model, trust_remote_code=True))
    with pytest.raises(UserError, match="--unprotected"):
        check_protection(Setup(remote), tmp_path, print)


@pytest.mark.parametrize(
    ("protection", "level", "said"),
    [
        (Protection.OVERLAY, "good", "an overlay, which is deleted with them"),
        (Protection.LANDLOCK, "warn", "Landlock"),
        (Protection.NONE, "warn", "no protection"),
    ],
)
def test_doctor_names_the_protection(
    offer: Callable[[Protection], None], protection: Protection, level: str, said: str
) -> None:
    offer(protection)
    finding = _protection(OWN)
    assert (finding.level, finding.what) == (level, "your files")
    assert said in finding.found


def test_the_answer_holds_for_every_trial_of_a_script(tmp_path: Path) -> None:
    """After the first run the job is made from what it showed."""
    profile: dict[str, Any] = {"config": {}, "client_optimizer": True, "untested_optimizer": False, "model_config": {}}
    profile |= {"through_arguments": False, "trained": [64], "frozen": 0, "seq_len": 8, "precision": "fp32"}
    profile |= {"micro_batch": 4, "accumulation": 2, "counted": "rows", "rows_per_sample": 1}
    profile |= {"checkpointing": False, "batch_note": ""}
    script, hardware = Script(("train.py",), str(tmp_path), profile=ScriptProfile.from_json(profile)), detect("cpu", 2)
    own = replace(make_job(), script=script, unprotected=True, interpreter=replace(OWN))
    whole = make_setup(own, hardware, tmp_path)
    started: list[Job] = []

    def session(*_: object, job: Job) -> Any:
        started.append(job)
        return SimpleNamespace(facts={}, close=lambda: None, measure=lambda *_: measured(40, 3))

    runs = ShortRuns(SimpleNamespace(session=session, job=own, hardware=hardware), 60.0)  # type: ignore[arg-type]
    check_batch(runs, script)
    for job in (after_probe(whole, Probe(script, None)).job, *started):
        assert (job.script, job.unprotected, job.interpreter) == (script, True, own.interpreter)
    assert len(started) == 1
    assert Job.from_json(own.to_json()) == replace(own, interpreter=OWN)
    assert not Job.from_json(own.to_json()).unprotected

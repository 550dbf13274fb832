"""The name of a study that nobody has named: another for whatever makes another job."""

from dataclasses import replace
from pathlib import Path

from autotune.commands.request import study_name
from autotune.problem.hardware import detect
from autotune.problem.job import Script
from autotune.problem.script_job import unknown_job
from tests.conftest import make_job


def test_what_makes_another_job_makes_another_name(tmp_path: Path) -> None:
    hardware = detect("cpu", 2)
    job = unknown_job(Script(("train.py", "--lr", "1"), str(tmp_path)), hardware)
    longer = unknown_job(Script(("train.py", "--lr", "2"), str(tmp_path)), hardware)
    capped = replace(hardware, memory_cap_bytes=2**30)
    names = [
        study_name(job, hardware),
        study_name(longer, hardware),
        study_name(job, hardware, 16),
        study_name(job, hardware, 32),
        study_name(job, hardware, "free"),
        study_name(job, capped),
        study_name(make_job(), hardware),
        study_name(make_job(seq_len=64), hardware),
        study_name(make_job(global_batch_size=16), hardware),
    ]
    assert len(set(names)) == len(names)
    assert names[0] == f"train-2xcpu-{job.script.key[:6]}", "as version 0.1 named it"  # type: ignore[union-attr]

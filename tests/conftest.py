"""What the tests share. Trials run on real CPU ranks; nothing here stands in for DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from autotune.executors.local import Deadlines, LocalExecutor
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.hardware import Hardware, detect
from autotune.problem.job import Job
from autotune.problem.models import resolve_model
from autotune.units import MIB

# Hypothesis fails a test by seconds on a clock; machines are shared and slow at times.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(  # `make mutants`: thousands of short runs that must not differ by chance
    "mutants", settings.get_profile("shared machine"), derandomize=True, max_examples=25, database=None
)
settings.load_profile("shared machine")


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("gpu") for item in items) and not has_cuda():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


def make_job(ranks: int = 2, **changes: object) -> Job:
    values = {"seq_len": 32, "precision": "fp32", **changes}
    return Job(resolve_model(str(values.pop("model", "tiny-llama"))), ranks, **values)  # type: ignore[arg-type]


def make_candidate(stage: int = 0, micro_batch: int = 1, accumulation: int = 1, **knobs: object) -> Candidate:
    small = {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000, "sub_group_size": 1_000_000}
    batch = {MICRO_BATCH: micro_batch, ACCUMULATION: accumulation}
    return Candidate.of({"zero_stage": stage, **batch, **small, **knobs})  # type: ignore[arg-type]


@pytest.fixture
def job() -> Job:
    return make_job()


@pytest.fixture
def hardware() -> Hardware:
    return detect("cpu", 2)


class Bench:
    """A LocalExecutor with one fork server for a whole module; cap and planted faults change from test to test."""

    def __init__(self, folder: Path) -> None:
        self.fault: dict[str, object] | None = None
        candidates = [make_candidate(), make_candidate(2, offload_optimizer="cpu")]
        self.executor = LocalExecutor(
            make_job(),
            detect("cpu", 2, memory_cap_bytes=2000 * MIB),
            folder,
            candidates,
            deadlines=Deadlines(start=60, init=60, step=60),
            fault=lambda name: self.fault,
        )
        self.executor.open(lambda text: None)
        self._count = 0

    def session(self, candidate: Candidate):  # type: ignore[no-untyped-def]
        self._count += 1
        return self.executor.session(candidate, f"{self._count:04d}")

    def run(self, candidate: Candidate, deadline_seconds: float = 120.0, effort=None):  # type: ignore[no-untyped-def]
        from autotune.executors.base import Effort

        with closing(self.session(candidate)) as session:
            return session.measure(candidate, effort or Effort(min_seconds=0.0, min_steps=2), deadline_seconds)


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("bench"))
    yield bench
    bench.executor.close()

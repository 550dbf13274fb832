"""From what ranks say and what the gauge saw to one Measurement."""

import dataclasses
from functools import partial
from typing import Any

import pytest

from autotune.executors.local import failed_outcome, measurement_of
from autotune.problem.hardware import Hardware, named_hardware
from autotune.problem.job import Script
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.util.units import GIB, MIB
from autotune.workers.failure_classifier import FailureEvidence
from autotune.workers.memory_peaks import MemoryPeaks
from tests.conftest import make_candidate, make_job

ON_GPUS = named_hardware("rtx3090", 2)
ON_CPU = Hardware("cpu", "x", 2, GIB, None, GIB)


def measured(hardware: Hardware, peaks: MemoryPeaks, *ranks: dict[str, int]) -> Measurement:
    results: list[dict[str, Any]] = [{"type": "measured", "step_seconds": [1.0] * 4, **rank} for rank in ranks]
    options: dict[str, Any] = {"candidate": make_candidate(), "job": make_job(2), "facts": {}}
    return measurement_of(results, peaks, hardware=hardware, **options)


def gpu(reserved_gib: float, overhead_mib: int = 800) -> dict[str, int]:
    return {"reserved_bytes": int(reserved_gib * GIB), "overhead_bytes": overhead_mib * MIB}


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        (MemoryPeaks(used=[9 * GIB, 10 * GIB]), 10 * GIB + 800 * MIB),  # NVML has missed a spike
        (MemoryPeaks(used=[12 * GIB, 10 * GIB]), 12 * GIB),  # what torch does not know of
        (MemoryPeaks(used=[0, 0], grown={0: 22 * GIB, 1: 10 * GIB}), 10 * GIB + 800 * MIB),  # a neighbour's, hidden
        (MemoryPeaks(used=[0, 0]), 10 * GIB + 800 * MIB),  # no NVML
    ],
)
def test_the_peak_of_a_gpu_rank_counts_its_context(peaks: MemoryPeaks, expected: int) -> None:
    found = measured(ON_GPUS, peaks, gpu(9), gpu(10))
    assert found.peak_bytes == expected
    assert found.overhead_bytes == 800 * MIB
    assert found.torch_reserved_bytes == 10 * GIB
    assert found.nvml_peak_bytes == peaks.worst


def test_the_worst_rank_is_that_with_most_in_all() -> None:
    assert (
        measured(ON_GPUS, MemoryPeaks(used=[0, 0]), gpu(10, 100), gpu(9.9, 900)).peak_bytes
        == int(9.9 * GIB) + 900 * MIB
    )


def test_a_cpu_rank_has_no_overhead() -> None:
    found = measured(ON_CPU, MemoryPeaks(used=[3 * MIB, 5 * MIB]), {"data_bytes": 6 * MIB}, {"data_bytes": 4 * MIB})
    assert (found.peak_bytes, found.overhead_bytes) == (6 * MIB, None)
    assert found.nvml_peak_bytes is None


def test_a_measurement_survives_the_study() -> None:
    found = measured(ON_GPUS, MemoryPeaks(used=[GIB, GIB]), gpu(1), gpu(1))
    data = Outcome.from_json(Outcome("ok", measurement=found).to_json())  # type: ignore[arg-type]
    assert data.measurement == found


def test_a_scripts_work_of_every_third_step_is_in_its_speed() -> None:
    script = make_job(2, script=Script(("train.py",), "/"))
    result = {"type": "measured", "step_seconds": [1.0, 1.0, 4.0] * 4, "reserved_bytes": GIB}
    options: dict[str, Any] = {"candidate": make_candidate(), "hardware": ON_GPUS, "facts": {}}
    found = measurement_of([result] * 2, MemoryPeaks(used=[0, 0]), job=script, **options)
    assert (found.step_seconds, found.samples_per_second, found.steps) == (2.0, 1.0, 12)
    named = measurement_of([result] * 2, MemoryPeaks(used=[0, 0]), job=make_job(2), **options)
    assert named.step_seconds == 1.0, "all of whose steps are alike"


failed = partial(failed_outcome, greeted=True, server_lives=True)
KILLED = FailureEvidence("cpu", statuses={0: -9, 1: -9})


def test_ranks_that_died_with_their_server_say_nothing_of_the_candidate() -> None:
    assert failed(KILLED).kind is OutcomeKind.CRASH
    assert failed(KILLED, greeted=False).reason.startswith("the ranks did not come up: ")
    gone = failed(KILLED, server_lives=False)
    assert (gone.kind, gone.reason) == (
        OutcomeKind.INFRASTRUCTURE,
        "the fork server was killed from outside, and its ranks with it",
    )


def test_what_ran_out_says_how_much_there_was() -> None:
    error = {"kinds": ["torch.OutOfMemoryError"], "text": "CUDA out of memory. Tried to allocate 2.00 GiB."}
    found = failed(FailureEvidence("cuda", [error], capacity_bytes=12 * GIB))
    assert (found.kind, found.capacity_bytes) == (OutcomeKind.OOM_DEVICE, 12 * GIB)
    assert Outcome.from_json(found.to_json()) == found
    assert "capacity_bytes" not in failed(FailureEvidence("cuda", [error])).to_json()
    assert failed(dataclasses.replace(KILLED, capacity_bytes=9)).capacity_bytes is None
    without = FailureEvidence(
        "cpu", statuses={0: -9}, peaks=MemoryPeaks(oom_kills=1), capacity_bytes=9, host_total_bytes=24 * GIB
    )
    found = failed(without)
    assert (found.kind, found.capacity_bytes) == (OutcomeKind.OOM_HOST, 24 * GIB), "of main memory, which ran out"


@pytest.mark.parametrize(("device", "peak_mib"), [("cpu", 520), ("cuda", 531)])
def test_what_a_cpu_rank_takes_to_report_its_failure_is_no_peak(device: str, peak_mib: int) -> None:
    """Its cap is lifted by then. On a GPU a cap is of the allocator alone, which is not all of a process."""
    error = {"kinds": ["torch.OutOfMemoryError"], "text": "out of memory", "numbers": {"allowed_bytes": 520 * MIB}}
    evidence = FailureEvidence(device, [error], peaks=MemoryPeaks(used=[300 * MIB, 531 * MIB]))
    assert failed(evidence).peak_bytes == peak_mib * MIB
    without = dataclasses.replace(evidence, errors=[{**error, "numbers": {}}])
    assert failed(without).peak_bytes == 531 * MIB
    assert failed(dataclasses.replace(evidence, peaks=MemoryPeaks())).peak_bytes is None


@pytest.mark.parametrize(
    ("device", "text", "numbers", "peak_mib"),
    [
        ("cpu", "", {"reserved_bytes": 480 * MIB}, 480),
        ("cpu", "", {"reserved_bytes": 531 * MIB, "allowed_bytes": 520 * MIB}, 520),
        ("cuda", "", {"reserved_bytes": 9 * MIB, "reserved_peak_bytes": 531 * MIB, "allowed_bytes": 520 * MIB}, 531),
        ("cuda", " this process has 600.00 MiB memory in use.", {"reserved_bytes": 531 * MIB}, 600),
    ],
)
def test_a_rank_knows_what_nobody_saw_of_a_short_trial(
    device: str, text: str, numbers: dict[str, int], peak_mib: int
) -> None:
    """On a busy machine a trial may be over before anybody has looked."""
    error = {"kinds": ["torch.OutOfMemoryError"], "text": f"out of memory.{text}", "numbers": numbers}
    for seen_mib in (0, 100):
        evidence = FailureEvidence(device, [error], peaks=MemoryPeaks(used=[seen_mib * MIB]))
        assert failed(evidence).peak_bytes == peak_mib * MIB


def test_where_main_memory_ran_out_the_kernel_chose_the_server() -> None:
    evidence = FailureEvidence("cpu", statuses={0: -9}, peaks=MemoryPeaks(oom_kills=1))
    assert failed(evidence, server_lives=False).kind is OutcomeKind.OOM_HOST

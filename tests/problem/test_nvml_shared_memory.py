"""GPUs that share main memory (DGX Spark, Jetson), of whose own NVML says that it is not supported."""

import dataclasses

import pytest

from autotune.commands import doctor
from autotune.errors import UserError
from autotune.problem import hardware, nvml
from autotune.problem.hardware import Hardware, detect
from autotune.problem.nvml import free_by_uuid, visible_gpus
from autotune.problem.space import fitted, load_space, parse_space
from autotune.search.fingerprint import changes, fingerprint, identity
from autotune.util.units import GIB
from tests.conftest import make_job
from tests.fake_driver import NOT_SUPPORTED, Card, Driver

BOTH = {"nvmlDeviceGetMemoryInfo": NOT_SUPPORTED, "nvmlDeviceGetMemoryInfo_v2": NOT_SUPPORTED}


@pytest.fixture
def spark(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """121 GiB of main memory, of which 113 are left."""
    monkeypatch.setattr(nvml, "host_total_bytes", lambda: 121 * GIB)
    for module in (nvml, hardware):
        monkeypatch.setattr(module, "host_available_bytes", lambda: 113 * GIB)
    driver.cards = [Card("NVIDIA GB10", 0, reserved_mib=0, capability=(12, 1))]
    driver.failing = dict(BOTH)
    driver.write()
    return driver


@pytest.mark.parametrize("failing", [BOTH, {}], ids=["not supported", "supported, and zero"])
def test_its_memory_is_main_memory(spark: Driver, failing: dict[str, int]) -> None:
    spark.failing = failing
    spark.cards[0].graphics = {1: 90}
    spark.write()
    found = detect("auto", None)
    assert (found.device, found.count, found.name, found.unified) == ("cuda", 1, "NVIDIA GB10", True)
    assert (found.memory_bytes, found.capacity_bytes, found.host_memory_bytes) == (121 * GIB, 113 * GIB, 113 * GIB)
    assert str(found) == "1 x NVIDIA GB10 (113.00 GiB free of 121.00 GiB of main memory)"
    assert Hardware.from_json(found.to_json()) == found
    (gpu,) = visible_gpus()
    assert gpu.held_bytes == 90 * 2**20, "of main memory only what is the GPU's"
    assert free_by_uuid() == {gpu.uuid: 113 * GIB}
    finding = next(one for one in doctor._gpus() if one.what == "GPU 0")
    assert finding.level == "warn"
    assert finding.found == (
        "NVIDIA GB10, 121.00 GiB of main memory, of which a process can have 113.00 GiB; 90.0 MiB in use by "
        f"{gpu_name(1)} 90.0 MiB; not in autotune's table"
    )


def gpu_name(pid: int) -> str:
    from autotune.util.linux import name_of

    return f"{name_of(pid)} (pid {pid})"


def test_a_card_with_memory_of_its_own_has_that(driver: Driver) -> None:
    driver.show(Card("NVIDIA H100 80GB HBM3", 80))
    assert not detect("auto", None).unified
    driver.failing = {"nvmlDeviceGetMemoryInfo_v2": NOT_SUPPORTED}  # before R510
    driver.write()
    assert not detect("auto", None).unified
    assert detect("auto", None).memory_bytes == 80 * GIB


def test_offloading_to_main_memory_is_left_out_and_said(spark: Driver) -> None:
    shared = detect("auto", None)
    own = dataclasses.replace(shared, unified=False)
    space, notes = fitted(load_space("default"), make_job(1), shared)
    told = [note for note in notes if "frees nothing here, where the GPU's memory is main memory: left out" in note]
    assert len(told) == 1
    assert "offload_optimizer cpu" in told[0]
    assert not any("frees nothing" in note for note in fitted(load_space("default"), make_job(1), own).notes)
    settings = [candidate.as_dict for candidate in space.candidates(make_job(1))]
    assert settings
    assert all(one.get("offload_optimizer") != "cpu" and one.get("offload_param") != "cpu" for one in settings)
    with pytest.raises(UserError, match="offload_optimizer cpu frees nothing here"):
        fitted(parse_space("name: mine\nfixed: {zero_stage: 2, offload_optimizer: cpu}\n"), make_job(1), shared)


def test_main_memory_that_differs_from_boot_to_boot_makes_no_other_study(
    spark: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = detect("auto", None)
    monkeypatch.setattr(nvml, "host_total_bytes", lambda: 121 * GIB - 4096)
    after = detect("auto", None)
    assert after.memory_bytes != before.memory_bytes
    assert identity(make_job(1), after) == identity(make_job(1), before)
    assert changes(fingerprint(make_job(1), before), fingerprint(make_job(1), after)) == []

"""A rank's own word for what it has of a GPU: torch.cuda stood in for, NVML's bindings real over a driver of tests."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autotune.rank import devices
from autotune.rank.devices import CudaDevice
from autotune.util.units import GIB, MIB
from tests.fake_driver import DRIVER_NOT_LOADED, Card, Driver, Slice

CAP = 8 * GIB
CONTEXT, NCCL, LATE = 500, 300, 90  # MiB


class StandIn:
    """torch.cuda of one process, whose device is what the driver shows of the first card."""

    def __init__(self, driver: Driver, shown: bool) -> None:
        self.driver, self.shown = driver, shown
        self.bad_fork, self.devices, self.share = False, 1, 1.0
        self.outside_mib, self.reserved_mib, self.most_mib = 0, 0, 0
        self.card_of_process: Slice | None = None
        self.said = ""  # UUID without prefix, if it is not the card's

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(devices, "take", lambda index: self.hold(outside_mib=CONTEXT))
        patch.setattr(devices, "available", lambda: True)
        for name, value in {
            "_is_in_bad_fork": lambda: self.bad_fork,
            "device_count": lambda: self.devices,
            "current_device": lambda: 0,
            "get_device_properties": lambda index: SimpleNamespace(
                uuid=self.said or self.card.uuid.removeprefix("GPU-")
            ),
            "mem_get_info": self.free_and_total,
            "memory_reserved": lambda: self.reserved_mib * MIB,
            "max_memory_reserved": lambda: self.most_mib * MIB,
            "max_memory_allocated": lambda: self.most_mib * MIB // 2,
            "memory_stats": lambda: {"num_alloc_retries": 3},
            "host_memory_stats": lambda: {"allocated_bytes.peak": 5},
            "set_per_process_memory_fraction": lambda share: setattr(self, "share", share),
        }.items():
            assert hasattr(torch.cuda, name) or name == "host_memory_stats"  # of torch 2.7
            patch.setattr(torch.cuda, name, value, raising=False)

    @property
    def card(self) -> Slice:
        return self.card_of_process or self.driver.cards[0]

    def hold(self, outside_mib: int | None = None, reserved_mib: int | None = None) -> None:
        """The process has so much from now on."""
        before = self.outside_mib + self.reserved_mib
        self.outside_mib = self.outside_mib if outside_mib is None else outside_mib
        self.reserved_mib = self.reserved_mib if reserved_mib is None else reserved_mib
        self.most_mib = max(self.most_mib, self.reserved_mib)
        now = self.outside_mib + self.reserved_mib
        if self.shown:
            self.card.processes[os.getpid()] = now
        else:
            self.card.hidden_mib += now - before
        self.driver.write()

    def free_and_total(self) -> tuple[int, int]:
        total = int(self.card.memory_gib * 1024) - self.card.reserved_mib
        used = self.card.hidden_mib + sum(self.card.processes.values()) + sum(self.card.graphics.values())
        return (total - used) * MIB, total * MIB


@pytest.fixture(params=[True, False], ids=["shown", "hidden"])
def torchs(request: pytest.FixtureRequest, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A card with a desktop of 1.3 GiB, whose processes NVML shows or a container hides."""
    driver.cards = [Card("A", 24)]
    driver.cards[0].graphics = {1: 1300} if request.param else {}
    driver.cards[0].hidden_mib = 0 if request.param else 1300
    driver.write()
    made = StandIn(driver, request.param)
    made.install(monkeypatch)
    return made


def joined(torchs: StandIn, cap_bytes: int | None = None) -> tuple[CudaDevice, dict[str, int]]:
    """A device whose process group is up."""
    device = CudaDevice(os.getpid())
    device.setup(0, cap_bytes, 1)
    torchs.hold(outside_mib=CONTEXT + NCCL)
    return device, device.joined()


def test_others_bytes_are_not_taken_for_the_ranks(torchs: StandIn) -> None:
    _, told = joined(torchs)
    assert told == {
        "uuid": torchs.card.uuid,
        "overhead_bytes": (CONTEXT + NCCL) * MIB,
        "outside_bytes": (CONTEXT + NCCL + 1300) * MIB,
    }
    assert torchs.share == 1.0


def test_the_cap_holds_for_allocator_and_overhead_together(torchs: StandIn) -> None:
    joined(torchs, CAP)
    _, total = torchs.free_and_total()
    assert torchs.share * total == pytest.approx(CAP - (CONTEXT + NCCL) * MIB)
    joined(torchs, 1)
    assert 0 < torchs.share < 1e-9, "a cap below the context leaves nothing"


def test_the_peak_is_reserved_and_overhead(torchs: StandIn) -> None:
    device, _ = joined(torchs)
    torchs.hold(reserved_mib=9000)
    torchs.hold(reserved_mib=7000, outside_mib=CONTEXT + NCCL + LATE)
    peaks = device.peaks()
    assert peaks["reserved_bytes"] == 9000 * MIB
    late = LATE if torchs.shown else 0  # that a container hides nobody can tell from a neighbour's
    assert peaks["overhead_bytes"] == (CONTEXT + NCCL + late) * MIB
    assert peaks["retries"] == 0, "those of before are not this candidate's"


def test_the_cap_holds_for_communicators_that_come_with_the_engine(torchs: StandIn) -> None:
    device, _ = joined(torchs, CAP)
    torchs.hold(reserved_mib=2000, outside_mib=CONTEXT + NCCL + LATE)
    _, total = torchs.free_and_total()
    assert torchs.share * total == pytest.approx(CAP - (CONTEXT + NCCL) * MIB)
    device.engine_built()
    assert torchs.share * total == pytest.approx(CAP - (CONTEXT + NCCL + LATE) * MIB)
    assert device.peaks()["overhead_bytes"] == (CONTEXT + NCCL + LATE) * MIB


def test_a_neighbour_does_not_grow_the_peak(torchs: StandIn) -> None:
    device, _ = joined(torchs)
    torchs.hold(reserved_mib=7000)
    torchs.card.hidden_mib += 12 * 1024
    torchs.driver.write()
    assert device.peaks()["overhead_bytes"] == (CONTEXT + NCCL) * MIB


def test_without_nvml_the_overhead_is_a_prior(torchs: StandIn) -> None:
    torchs.driver.failing = {"nvmlInitWithFlags": DRIVER_NOT_LOADED}
    torchs.driver.write()
    device, told = joined(torchs, CAP)
    assert (told["uuid"], told["overhead_bytes"]) == ("", devices.OVERHEAD_BYTES)
    assert device.peaks()["overhead_bytes"] == devices.OVERHEAD_BYTES


@pytest.mark.parametrize("named", ["slice", "card"])
def test_a_slice_by_its_own_name_or_its_cards(driver: Driver, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    """CUDA may say the UUID of either."""
    driver.cards = [Card("A100", 40, capability=(8, 0), mig=True)]
    driver.cards[0].slices = [Slice("A100 MIG 1g.5gb", 4.75), Slice("A100 MIG 1g.5gb", 4.75)]
    stand_in = StandIn(driver, shown=True)
    stand_in.card_of_process = driver.cards[0].slices[0]
    stand_in.install(monkeypatch)
    said = stand_in.card if named == "slice" else driver.cards[0]
    stand_in.said = said.uuid.partition("-")[2]
    device, told = joined(stand_in)
    assert (device.uuid, told["overhead_bytes"]) == (stand_in.card.uuid, (CONTEXT + NCCL) * MIB)


def test_a_rank_without_a_gpu_of_its_own(torchs: StandIn) -> None:
    with pytest.raises(RuntimeError, match="there is no GPU for rank 1: CUDA shows 1"):
        CudaDevice(os.getpid()).setup(1, None, 1)
    torchs.bad_fork = True
    with pytest.raises(RuntimeError, match="CUDA was woken before the fork"):
        CudaDevice(os.getpid()).setup(0, None, 1)


def test_what_a_training_of_the_users_own_has_taken(torchs: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    torchs.hold(outside_mib=CONTEXT, reserved_mib=9000)
    torchs.hold(reserved_mib=7000)
    desktop = 0 if torchs.shown else 1300  # where processes are hidden it counts too: nobody can tell
    assert devices.used_bytes() == (9000 + CONTEXT + desktop) * MIB
    monkeypatch.setattr(devices, "available", lambda: False)
    assert devices.used_bytes() == devices.data_bytes("self")


ROOT = Path(devices.__file__).parents[1]

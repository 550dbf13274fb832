"""What a machine has: through a fake driver and a fake root of the file system, so that any machine can run this."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import UserError
from autotune.problem import gpu_specs, hardware
from autotune.problem.gpu_specs import default_host_bytes, facts_for, gpu_table, named_gpu
from autotune.problem.hardware import Hardware, detect, named_hardware
from autotune.search.fingerprint import fingerprint
from autotune.util.units import GIB, MIB
from autotune.workers.launchers import trial_environment
from tests.conftest import make_job
from tests.fake_driver import FUNCTION_NOT_FOUND, GPU_IS_LOST, LIB_RM_VERSION_MISMATCH, Card, Driver, Slice

RTX_3090 = "NVIDIA GeForce RTX 3090"


@pytest.fixture
def four_gpus(driver: Driver) -> Driver:
    driver.show(*(Card(RTX_3090, 24) for _ in range(4)))
    return driver


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of /proc and /sys as they lie under this folder; a machine of 64 GiB and 8 cores without a GPU."""
    for folder in ("proc", "sys/fs/cgroup/memory"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(hardware, "settled_gpus", lambda count: [])
    monkeypatch.setattr(hardware, "unseen_gpu", lambda: "")
    monkeypatch.setattr(hardware, "Path", lambda file: tmp_path / str(file).lstrip("/"))
    monkeypatch.setattr(hardware, "host_available_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(hardware.platform, "processor", lambda: "")
    monkeypatch.setattr(hardware.platform, "machine", lambda: "riscv64")
    return tmp_path


# -- GPUs ----------------------------------------------------------------------------------------------------------------


def test_gpus_are_found_and_known(four_gpus: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "host_available_bytes", lambda: 100 * GIB)
    found = detect("auto", None)
    uuids = tuple(card.uuid for card in four_gpus.cards)
    taken = {"taken_bytes": 320 * MIB, "gpus": uuids}
    assert found == Hardware("cuda", RTX_3090, 4, 24 * GIB, None, 100 * GIB, facts="rtx3090", **taken)  # type: ignore
    assert found.gpu_facts is gpu_table()["rtx3090"]
    assert detect("cuda", 3).gpus == uuids[:3]
    assert detect("cpu", 2).device == "cpu"
    assert detect("cpu", 2).gpus == ()


def test_the_smallest_of_unlike_gpus_decides_and_an_unknown_one_is_nobodys(driver: Driver) -> None:
    driver.show(Card("Voodoo 3", 16), Card("Voodoo 2", 8))
    found = detect("cuda", None)
    assert (found.name, found.count, found.memory_bytes) == ("Voodoo 2 + Voodoo 3", 2, 8 * GIB)
    assert found.capacity_bytes == 8 * GIB - 320 * MIB
    assert found.facts is None
    assert found.bf16, "until a trial says otherwise"
    assert detect("cuda", 1).memory_bytes == 16 * GIB


def test_more_gpus_than_there_are_are_never_silently_fewer(four_gpus: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError) as caught:
        detect("cuda", 8)
    assert str(caught.value) == (
        "--gpus 8: found 4 (CUDA_VISIBLE_DEVICES counts); try --gpus 4, "
        "or `autotune plan --gpu NAME --gpus 8` to predict without them"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3,9,0")
    assert detect("cuda", None).gpus == (four_gpus.cards[1].uuid, four_gpus.cards[3].uuid)
    with pytest.raises(UserError, match="found 2"):
        detect("auto", 3)


# -- how much of it ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_capacity_is_what_a_process_can_have(driver: Driver, version: int) -> None:
    """Total less what the driver keeps, less what a desktop holds; old drivers only tell the sum of both."""
    driver.cards = [Card(RTX_3090, 24, reserved_mib=320, graphics={1: 1300, 2: 31})]
    driver.failing = {"nvmlDeviceGetMemoryInfo_v2": FUNCTION_NOT_FOUND} if version == 1 else {}
    driver.write()
    found = detect("auto", None, headroom=0.05)
    assert found.memory_bytes == 24 * GIB
    assert found.capacity_bytes == 24 * GIB - (320 + 1331) * MIB
    assert found.ceiling_bytes == int(0.95 * found.capacity_bytes)
    assert str(found) == f"1 x {RTX_3090} (22.39 GiB free of 24.00 GiB)"
    assert found.facts == "rtx3090", "a desktop makes no other card of it"
    with pytest.raises(UserError, match=r"--memory-cap 23\.00 GiB is above the capacity of 22\.39 GiB a rank"):
        detect("auto", None, memory_cap_bytes=23 * GIB)
    capped = detect("auto", None, memory_cap_bytes=16 * GIB)
    assert capped.capacity_bytes == 16 * GIB
    assert str(capped) == f"1 x {RTX_3090} (22.39 GiB free of 24.00 GiB) capped at 16.00 GiB a rank"


def test_the_fullest_gpu_decides_what_a_rank_can_have(four_gpus: Driver) -> None:
    four_gpus.cards[2].hidden_mib = 12 * 1024
    four_gpus.write()
    assert detect("cuda", 2).capacity_bytes == 24 * GIB - 320 * MIB
    assert detect("cuda", 3).capacity_bytes == 12 * GIB - 320 * MIB


def test_a_desktop_that_changes_makes_no_other_study(four_gpus: Driver) -> None:
    before = fingerprint(make_job(4), detect("cuda", None))
    for card in four_gpus.cards:
        card.graphics = {1: 1300}
    four_gpus.write()
    assert fingerprint(make_job(4), detect("cuda", None)) == before


# -- which of them -------------------------------------------------------------------------------------------------------


def test_a_slice_is_one_rank_of_its_own_size(driver: Driver) -> None:
    slices = [Slice("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.75, hidden_mib=12) for _ in range(7)]
    driver.show(Card("NVIDIA A100-SXM4-40GB", 40, capability=(8, 0), mig=True, slices=slices))
    found = detect("auto", None)
    assert (found.name, found.count, found.memory_bytes) == (slices[0].name, 1, int(4.75 * GIB))
    assert found.capacity_bytes == int(4.75 * GIB) - 12 * MIB
    assert found.gpus == (slices[0].uuid,)
    assert found.facts is None, "the table's rates are of whole cards"
    with pytest.raises(UserError) as caught:
        detect("auto", 7)
    assert str(caught.value) == (
        f"--gpus 7: a CUDA process can use one MIG slice only, here {slices[0].name}, and NCCL refuses two ranks on it; "
        "try --gpus 1, or turn MIG off (`nvidia-smi -mig 0`)"
    )


WORKSTATION = (("NVIDIA GeForce RTX 3060", 12), ("NVIDIA GeForce RTX 4090", 24))


@pytest.fixture
def workstation(driver: Driver) -> Driver:
    """Its fast card is the second on the bus: CUDA alone would call it the first."""
    driver.show(*(Card(name, gib) for name, gib in WORKSTATION))
    return driver


def test_unlike_gpus_are_counted_by_bus_and_training_is_told_to(
    workstation: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = detect("auto", 1)
    assert found.name == WORKSTATION[0][0]
    assert found.environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert training_order("cuda") == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", workstation.cards[1].uuid[:8])
    assert detect("auto", 1).name == WORKSTATION[1][0]
    assert detect("auto", 1).environment == {}, "a UUID means the same in any order"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert detect("auto", 1).environment == {}, "it is set already"


def test_an_order_that_only_cuda_knows(workstation: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert training_order("cuda") == "FASTEST_FIRST", "the user's own word"
    with pytest.raises(UserError) as caught:
        detect("auto", 1)
    assert str(caught.value) == (
        "CUDA_DEVICE_ORDER=FASTEST_FIRST with different GPUs: autotune cannot know which 1 come first in this order; "
        "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name them by UUID in CUDA_VISIBLE_DEVICES"
    )
    assert detect("auto", 2).capacity_bytes == 12 * GIB - 320 * MIB, "all of them, in whatever order"
    workstation.cards[0].name = WORKSTATION[1][0]
    workstation.write()
    assert detect("auto", 1).count == 1, "cards that are alike"


def training_order(device: str) -> str:
    return trial_environment(device, 1)["CUDA_DEVICE_ORDER"]


def test_a_gpu_that_is_gone_is_said_in_one_line(four_gpus: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    four_gpus.cards[1].error = GPU_IS_LOST
    four_gpus.write()
    with pytest.raises(
        UserError, match=r"^GPU 1 does not answer \(GPU is lost\): leave it out with CUDA_VISIBLE_DEVICES"
    ):
        detect("auto", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,3")
    assert detect("auto", None).count == 3


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        (
            {"nvmlInitWithFlags": LIB_RM_VERSION_MISMATCH},
            "NVIDIA's driver does not answer: RM has detected an NVML/RM version mismatch",
        ),
        ({"nvmlDeviceGetCount_v2": 999}, "NVIDIA's driver does not answer: Unknown Error"),
    ],
)
def test_a_driver_that_does_not_answer(four_gpus: Driver, failing: dict[str, int], message: str) -> None:
    four_gpus.failing = failing
    four_gpus.write()
    for device, gpus in (("cuda", None), ("auto", 2)):
        with pytest.raises(UserError) as caught:
            detect(device, gpus)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


# -- without a GPU -------------------------------------------------------------------------------------------------------


def test_without_a_gpu(root: Path) -> None:
    found = detect("cpu", None)
    assert found == Hardware("cpu", "CPU rank of riscv64", 2, int(64 * GIB * 0.9) // 2, None, 64 * GIB)
    assert detect("cpu", 8).count == 8
    assert detect("cpu", 8).memory_bytes == int(64 * GIB * 0.9) // 8


@pytest.mark.parametrize(
    ("device", "gpus", "message"),
    [
        ("auto", None, "found no GPU on this machine; add --device cpu for CPU ranks"),
        ("auto", 5, "found no GPU on this machine; add --device cpu for CPU ranks"),
        ("cuda", 2, "found no GPU on this machine; add --device cpu for CPU ranks"),
        ("tpu", 1, "--device tpu: expected auto, cuda or cpu"),
    ],
)
def test_what_cannot_be_had(root: Path, device: str, gpus: int | None, message: str) -> None:
    with pytest.raises(UserError) as caught:
        detect(device, gpus)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("cores", "ranks", "most"), [(None, 1, 2), (8, 2, 8)])
def test_ranks_of_few_cores(
    root: Path, monkeypatch: pytest.MonkeyPatch, cores: int | None, ranks: int, most: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert detect("cpu", None).count == ranks
    assert detect("cpu", most).count == most, "two ranks are worth trying even on one core"
    with pytest.raises(UserError, match=f"{cores or 1} CPU cores run at most {most} ranks; try --gpus {most}"):
        detect("cpu", most + 1)


def test_the_processors_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "proc/cpuinfo").write_text("flags\t: fpu\nmodel name\t: Xeon 2: the next\nmodel name\t: another\n")
    assert detect("cpu", 1).name == "CPU rank of Xeon 2: the next"
    (root / "proc/cpuinfo").write_text("hart\t: 0\n")
    monkeypatch.setattr(hardware.platform, "processor", lambda: "POWER9")
    assert detect("cpu", 1).name == "CPU rank of POWER9"


# -- what is used of it --------------------------------------------------------------------------------------------------


def test_caps_and_headroom(root: Path) -> None:
    with pytest.raises(UserError) as caught:
        detect("cpu", 2, memory_cap_bytes=32 * GIB)
    assert str(caught.value) == (
        "--memory-cap 32.00 GiB is above the capacity of 28.80 GiB a rank: give less, or leave it out"
    )
    whole = detect("cpu", 2)
    assert (whole.capacity_bytes, whole.headroom) == (whole.memory_bytes, 0.05)
    assert whole.ceiling_bytes == int(0.95 * whole.memory_bytes)
    assert str(whole) == "2 x CPU rank of riscv64 (28.80 GiB)"
    capped = detect("cpu", 2, memory_cap_bytes=GIB, headroom=0.1)
    assert (capped.capacity_bytes, capped.ceiling_bytes) == (GIB, int(0.9 * GIB))
    assert str(capped) == "2 x CPU rank of riscv64 (28.80 GiB) capped at 1.00 GiB a rank"
    assert detect("cpu", 2, memory_cap_bytes=whole.memory_bytes).capacity_bytes == whole.memory_bytes


def test_a_reserve_is_left_to_another_process_and_limits_ranks(four_gpus: Driver) -> None:
    whole = detect("cuda", 2)  # 320 MiB of each are taken
    assert whole.limit_bytes is None
    kept = whole.reserving(8 * GIB)
    assert (kept.capacity_bytes, kept.limit_bytes, kept.ceiling_bytes) == (16 * GIB, 16 * GIB, int(0.95 * 16 * GIB))
    assert str(kept) == f"2 x {RTX_3090} (23.69 GiB free of 24.00 GiB) less 8.00 GiB reserved for another process"
    assert Hardware.from_json(json.loads(json.dumps(kept.to_json()))) == kept
    assert whole.reserving(200 * MIB).capacity_bytes == whole.capacity_bytes, "what is held already counts"
    both = whole.capped(4 * GIB).reserving(8 * GIB)
    assert both.limit_bytes == 4 * GIB
    assert str(both).endswith(" capped at 4.00 GiB a rank, 8.00 GiB reserved for another process")
    marks = [fingerprint(make_job(), one)["hardware"] for one in (whole, kept)]
    assert marks[1] == {**marks[0], "reserve_bytes": 8 * GIB}
    with pytest.raises(UserError, match=r"--reserve 23.99 GiB leaves too little of 24.00 GiB a rank"):
        whole.reserving(int(23.99 * GIB))


# -- the table -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "row"),
    [
        ("H100", "h100"),
        ("a100_80", "a100-80gb"),
        ("h100-sxm", "h100"),
        ("h100-80gb", "h100"),
        ("4090", "rtx4090"),
        ("5090", "rtx5090"),
        ("NVIDIA-A100", "a100-80gb"),
    ],
)
def test_names_that_people_type(typed: str, row: str) -> None:
    assert named_gpu(typed).name == row


def test_a_name_that_is_nobodys() -> None:
    with pytest.raises(UserError) as caught:
        named_gpu("RTX3091")
    message = str(caught.value)
    assert message.startswith("unknown GPU 'RTX3091'; did you mean rtx3090")
    assert sum(name in message.replace("?", "").split() for name in gpu_table()) == 3
    with pytest.raises(UserError, match=r"did you mean \S+ or \S+ or \S+\? docs/gpus.md lists all"):
        named_gpu("xyz")


@pytest.mark.parametrize(
    ("name", "gib", "row"),
    [
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", 40, "a100-40gb"),
        ("Tesla V100-SXM2-32GB", 32, "v100-32gb"),
        ("NVIDIA L4", 23, "l4"),
        ("NVIDIA L40S", 45, "l40s"),
        ("NVIDIA H100 80GB HBM3", 80, "h100"),
        ("NVIDIA A40-48Q", 48, "a40"),  # a virtual one
        ("NVIDIA GH200 480GB", 96, "gh200"),  # no H200
        ("Voodoo 2", 1, None),
    ],
)
def test_nvmls_names(name: str, gib: int, row: str | None) -> None:
    found = facts_for(name, gib * GIB)
    assert (found.name if found else None) == row


def test_of_one_name_the_nearest_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(gpu_table()["rtx3080"], match="RTX 3080")
    rows = {f"{gib}gb": dataclasses.replace(row, name=f"{gib}gb", memory_gib=gib) for gib in (8, 20, 12)}
    monkeypatch.setattr(gpu_specs, "gpu_table", lambda: rows)
    found = {gib: facts_for("NVIDIA GeForce RTX 3080", gib * GIB) for gib in (9, 12, 15, 17)}
    assert {gib: row.name for gib, row in found.items() if row} == {9: "8gb", 12: "12gb", 15: "12gb", 17: "20gb"}


@given(st.sampled_from(sorted(gpu_table())), st.integers(1, 4096))
def test_a_named_gpu_need_not_be_here(name: str, count: int) -> None:
    found, row = named_hardware(name, count), gpu_table()[name]
    assert (found.device, found.name, found.count, found.facts) == ("cuda", name, count, name)
    assert found.memory_bytes == found.capacity_bytes == int(row.memory_gib * GIB)
    assert found.host_memory_bytes == default_host_bytes(name, count) >= 16 * GIB
    assert (found.gpu_facts, found.bf16, found.headroom) == (row, row.bf16, 0.05)


def test_a_named_machine_as_the_user_describes_it() -> None:
    found = named_hardware("rtx4090", 4, host_memory_bytes=5 * GIB, headroom=0.2)
    assert (found.host_memory_bytes, found.headroom) == (5 * GIB, 0.2)


def test_nodes_share_the_devices_and_have_a_network_each() -> None:
    found = named_hardware("a100-80gb", 16, nodes=2)
    assert (found.per_node, found.network_gb_per_s) == (8, 200.0)
    assert found.host_memory_bytes == default_host_bytes("a100-80gb", 8)  # of one node
    assert str(found) == "16 x a100-80gb (79.35 GiB) on 2 nodes"
    assert Hardware.from_json(found.to_json()) == found
    assert named_hardware("h100", 8, nodes=2).network_gb_per_s == 200.0  # an adapter a GPU
    assert named_hardware("rtx4090", 8, nodes=2).network_gb_per_s == 12.5
    assert named_hardware("h100-pcie", 8, nodes=2).network_gb_per_s == 12.5
    assert found.with_rates(network_gb_per_s=50.0).network_gb_per_s == 50.0


@pytest.mark.parametrize(
    ("name", "joined", "rates"),
    [
        ("NVIDIA A100-SXM4-40GB", "ssss", ("nvlink", 300, 100)),
        ("NVIDIA A100-PCIE-40GB", "    ", ("pcie", 24, 12.5)),
        ("NVIDIA A100-PCIE-40GB", "aabb", ("pcie", 24, 12.5)),  # bridges join pairs, and a ring of four passes PCIe
    ],
)
def test_nvlink_is_what_the_driver_shows(driver: Driver, name: str, joined: str, rates: tuple[str, float]) -> None:
    driver.show(*(Card(name, 40, nvlink=one.strip()) for one in joined))
    found = Hardware.from_json(detect("cuda", None).to_json())
    assert (found.gpu_facts.link, found.gpu_facts.link_gb_per_s, found.network_gb_per_s) == rates
    driver.failing = {"nvmlDeviceGetP2PStatus": FUNCTION_NOT_FOUND}  # an old driver: the table decides
    driver.write()
    assert detect("cuda", None).gpu_facts.link == "nvlink"


@pytest.mark.parametrize("nodes", [0, 16])
def test_nodes_must_divide_the_devices(nodes: int) -> None:
    with pytest.raises(UserError, match="cannot be split"):
        dataclasses.replace(named_hardware("a100-80gb", 8), nodes=nodes)


@pytest.mark.parametrize(("name", "gib"), [("v100", 31.75), ("a100", 79.35), ("a10", 22.2)])
def test_a_named_card_has_the_memory_that_torch_reports(name: str, gib: float) -> None:
    assert named_hardware(name, 1).memory_bytes == int(gib * GIB)

"""Which GPUs CUDA shows, through NVML's real bindings and a driver that tests write."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from autotune.problem import nvml
from autotune.problem.hardware import detect
from autotune.problem.nvml import (
    all_cards,
    bytes_of,
    compute_capabilities,
    driver_failure,
    free_by_uuid,
    selected,
    settled_gpus,
    visible_gpus,
)
from autotune.search.fingerprint import driver_versions
from autotune.util.interpreter import NVML_FILE
from autotune.util.units import GIB, MIB
from autotune.workers.gpu_memory import make_meter
from tests.fake_driver import DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, NO_PERMISSION, Card, Driver, Slice

UUIDS = ["GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333", "GPU-cccc4444"]
CASES = [
    (None, [0, 1, 2, 3]),
    ("0", [0]),
    ("1, 0", [1, 0]),
    ("3,4,0", [3]),  # what comes after the first invalid one is not seen
    ("0,0", []),
    ("1,0,1", []),
    ("-1", []),
    ("0,-1,1", [0]),
    ("", []),
    ("1gpu,0", [1, 0]),
    ("+2", [2]),
    ("gpu0", []),
    ("GPU-b", [2]),
    ("GPU-bbbb3333,GPU-cccc4444", [2, 3]),
    ("GPU-cccc,GPU-bbbb", [3, 2]),
    ("GPU-aaaa", []),  # of two
    ("GPU-b,GPU-aaaa,GPU-c", [2]),
    ("GPU-b,GPU-bbbb", []),
    ("GPU-b,GPU-b", []),
    ("GPU-b, GPU-c", [2]),  # a space belongs to the UUID
    ("GPU-b,0", [2]),
    ("0,GPU-b", [0]),
    ("GPU-ffff", []),
    ("MIG-1234", []),
]


def torchs(wanted: str | None, uuids: list[str], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Torch's own answer, by the parts of `torch.cuda.device_count` that look at no device."""
    import torch.cuda

    if wanted is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    found = torch.cuda._parse_visible_devices()
    if found and isinstance(found[0], str):
        return torch.cuda._transform_uuid_to_ordinals(found, uuids)  # type: ignore[arg-type]
    return found[: next((i for i, place in enumerate(found) if place >= len(uuids)), len(found))]  # type: ignore


@pytest.mark.parametrize(("wanted", "expected"), CASES)
def test_what_cuda_visible_devices_leaves(
    wanted: str | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert selected(wanted, UUIDS) == expected
    assert torchs(wanted, UUIDS, monkeypatch) == expected


part = st.one_of(
    st.integers(-2, 6).map(str),
    st.sampled_from(["", " ", "0 ", "1gpu", "+1", "x", "GPU-", "GPU-a", "GPU-aaaa1", "GPU-b", "GPU-bbbb", "MIG-a"]),
)


def test_a_gpu_and_who_is_on_it(driver: Driver) -> None:
    driver.show(Card("A", 24, processes={4711: 12 * 1024, 7: -1}, graphics={1: 1300}, hidden_mib=100))
    (gpu,) = visible_gpus()
    assert (gpu.label, gpu.uuid, gpu.name) == ("GPU 0", driver.cards[0].uuid, "A")
    assert gpu.total_bytes == 24 * GIB
    assert gpu.reserved_bytes == 320 * MIB
    assert gpu.held_bytes == 12 * GIB + 1400 * MIB
    assert gpu.free_bytes == gpu.total_bytes - gpu.reserved_bytes - gpu.held_bytes
    assert gpu.holders == {4711: 12 * GIB, 7: 0, 1: 1300 * MIB}
    assert bytes_of(4711, gpu.uuid) == 12 * GIB
    assert bytes_of(7, gpu.uuid) is None
    assert bytes_of(8, gpu.uuid) is None
    assert free_by_uuid() == {gpu.uuid: gpu.free_bytes}


DEAD = 4_194_303  # above the highest pid that Linux gives: a process that has ended


@pytest.mark.parametrize(
    ("mib", "looks"),
    [
        ({"processes": {DEAD: 12_000}}, 3),
        ({"hidden_mib": 12_000}, 3),
        ({"processes": {os.getpid(): 12_000}}, 0),
        ({"hidden_mib": 300}, 0),
    ],
)
def test_memory_of_what_has_just_ended_is_waited_for(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, mib: dict[str, Any], looks: int
) -> None:
    card = Card("A", 24, **mib)
    driver.show(card)
    steps = [8000, 2000, 0]
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        card.processes, card.hidden_mib = {}, steps.pop(0) if steps else 0
        driver.write()

    monkeypatch.setattr(nvml.time, "sleep", sleep)
    (gpu,) = settled_gpus(1)
    assert len(slept) == looks
    if looks:
        assert gpu.held_bytes == 0


def test_a_neighbour_that_stays_is_waited_for_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.show(Card("A", 24, hidden_mib=12_000), Card("A", 24, hidden_mib=9_000))
    slept: list[float] = []
    monkeypatch.setattr(nvml.time, "sleep", slept.append)
    assert settled_gpus(1)[0].held_bytes == 12_000 * MIB
    assert len(slept) == 1


def test_names_of_holders_the_largest_first() -> None:
    text = nvml.holders_text({os.getpid(): GIB, 2**22 + 1: 2 * GIB})
    assert text.startswith("a process (pid 4194305) 2.00 GiB, ")
    assert text.endswith(f"(pid {os.getpid()}) 1.00 GiB")
    assert nvml.holders_text({}) == ""


def test_an_old_driver_does_not_tell_what_it_keeps(driver: Driver) -> None:
    driver.failing = {"nvmlDeviceGetMemoryInfo_v2": FUNCTION_NOT_FOUND}
    driver.show(Card("A", 24, hidden_mib=1000))
    (gpu,) = visible_gpus()
    assert (gpu.reserved_bytes, gpu.held_bytes) == (0, 1320 * MIB)
    assert gpu.free_bytes == 24 * GIB - 1320 * MIB


def test_a_card_that_this_process_may_not_open_is_not_counted(driver: Driver) -> None:
    driver.show(Card("A", 24), Card("B", 24, error=NO_PERMISSION), Card("C", 24))
    assert [(gpu.label, gpu.name) for gpu in all_cards()] == [("GPU 0", "A"), ("GPU 1", "C")]


def sliced(name: str, count: int) -> Card:
    return Card(name, 40, capability=(8, 0), mig=True, slices=[Slice(f"{name} MIG 1g.5gb", 4.75) for _ in range(count)])


def test_cuda_shows_one_slice(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, first, second = Card("A100", 40, capability=(8, 0)), sliced("A100", 3), sliced("A100", 2)
    driver.show(whole, first, second)
    assert [gpu.label for gpu in visible_gpus()] == ["GPU 1 slice 0"], "and beside it no whole card"
    for wanted, expected in (
        ("0", [whole.uuid]),
        ("2", [second.slices[0].uuid]),
        ("2,0", [second.slices[0].uuid]),
        (first.slices[2].uuid, [first.slices[2].uuid]),
        (first.slices[2].uuid[:10], [first.slices[2].uuid]),
        (f"{second.slices[1].uuid},{first.slices[0].uuid}", [second.slices[1].uuid]),
        ("MIG-nobodys", []),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
        assert [gpu.uuid for gpu in visible_gpus()] == expected, wanted
    slice_ = visible_gpus
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert slice_()[0].is_slice
    assert slice_()[0].total_bytes == int(4.75 * GIB)


def test_a_card_in_mig_mode_without_slices_cannot_be_used(driver: Driver) -> None:
    driver.show(sliced("A100", 0), Card("A100", 40, capability=(8, 0)))
    assert [gpu.label for gpu in visible_gpus()] == ["GPU 1"]
    driver.show(sliced("A100", 0))
    assert visible_gpus() == []


def test_without_a_driver(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.failing = {"nvmlInitWithFlags": DRIVER_NOT_LOADED}
    driver.write()
    assert visible_gpus() == all_cards() == []
    assert free_by_uuid() == {}
    assert bytes_of(1, "GPU-x") is None
    assert driver_failure() == "Driver Not Loaded"
    import pynvml

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    assert visible_gpus() == []
    assert driver_failure() == "", "a machine that never had one"


def test_a_process_of_its_own_finds_the_library_as_it_finds_a_real_one(driver: Driver) -> None:
    """By name, through the loader's path; and torch, which has bindings of its own, counts the same."""
    driver.show(Card("A", 24), Card("B", 24), Card("C", 24))
    code = (
        "import json, torch; from autotune.problem.nvml import visible_gpus;"
        "print(json.dumps([[gpu.uuid for gpu in visible_gpus()], torch.cuda._device_count_nvml()]))"
    )
    env = {**os.environ, **driver.environment, "CUDA_VISIBLE_DEVICES": "2,0,7"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[driver.cards[2].uuid, driver.cards[0].uuid], 2]


_WITHOUT_BINDINGS = """
import sys
sys.path[:] = [path for path in sys.path if not path.endswith("site-packages")]
from autotune.problem import nvml as gpus
try:
    import pynvml
except ImportError:
    print("none of its own", gpus._bindings().__name__, gpus._bindings() is gpus._bindings(), "pynvml" in sys.modules)
"""


def test_a_rank_whose_environment_has_no_bindings_reads_the_tuners_one_file() -> None:
    import pynvml

    env = {**os.environ, NVML_FILE: pynvml.__file__}
    command = [sys.executable, "-c", _WITHOUT_BINDINGS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "none of its own autotune_nvml True False", done.stderr
    del env[NVML_FILE]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert "ImportError: nvidia-ml-py is not installed" in done.stderr


def test_an_old_package_of_the_same_name_does_not_hide_the_bindings(tmp_path: Path) -> None:
    (tmp_path / "pynvml").mkdir()
    (tmp_path / "pynvml" / "__init__.py").write_text("def nvmlInit(): raise SystemExit('the old one')\n")
    code = "from autotune.problem import nvml; print(nvml._bindings().nvmlMemory_v2, nvml.driver_error() is not None)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(0x02000028), "True"], done.stderr


def test_what_cards_can_compute_is_of_those_that_cuda_shows(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Slice("MIG 1g.10gb", 10)
    sliced = Card("A100", 80, capability=(8, 0), mig=True, slices=[one])
    driver.show(Card("H100", 80, capability=(9, 0)), Card("T4", 16, capability=(7, 5)), sliced, Card("A10", 24))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert compute_capabilities() == ["7.5", "9.0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", one.uuid)
    assert compute_capabilities() == ["8.0"], "of the slice's card"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert compute_capabilities() == []


def test_nvml_is_opened_once_per_process(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without persistence mode each opening may wake every card for seconds."""
    import pynvml

    driver.show(Card("A", 24))
    calls: list[str] = []
    for name in ("nvmlInit", "nvmlShutdown"):
        own = getattr(pynvml, name)
        monkeypatch.setattr(pynvml, name, lambda own=own, name=name: [calls.append(name), own()])
    hardware = detect("cuda", 1)
    make_meter(hardware).external_usage_warnings()
    assert driver_versions()["driver"] == driver.version
    assert compute_capabilities() == ["8.6"]
    assert free_by_uuid().keys() == {driver.cards[0].uuid}
    assert calls == ["nvmlInit"]
    monkeypatch.setattr(os, "getpid", lambda: 2)  # a forked child
    assert all_cards()
    assert calls == ["nvmlInit", "nvmlInit"]

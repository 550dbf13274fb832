"""GPUs that are no row of the table: slices, virtual parts, cards that nobody has entered."""

from __future__ import annotations

import dataclasses

import pytest

from autotune.problem.gpu_specs import NvmlFigures, driver_figures, gpu_table, unlisted_gpu_facts
from autotune.problem.hardware import Hardware, detect
from autotune.util.units import GIB
from tests.fake_driver import Card, Driver, Slice


@pytest.mark.parametrize(
    ("name", "gib", "card", "computing", "of_memory"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9.75, "a100-80gb", 1 / 7, 1 / 8),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.75, "a100-40gb", 1 / 7, 1 / 8),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.5, "h100", 3 / 7, 1 / 2),
        ("NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", 39.5, "h100", 1 / 7, 1 / 2),
        ("NVIDIA A30 MIG 2g.12gb", 11.9, "a30", 1 / 2, 1 / 2),
        ("NVIDIA H200 MIG 7g.141gb", 140, "h200", 1, 1),
        ("NVIDIA A100-SXM4-80GB", 9.75, "a100-80gb", 1 / 8, 1 / 8),  # a slice by the name of its card
        ("GRID A100D-1-10C", 9.75, "a100-80gb", 1 / 7, 1 / 8),
    ],
)
def test_a_slice_is_its_share_of_the_card(name: str, gib: float, card: str, computing: float, of_memory: float) -> None:
    found, row = unlisted_gpu_facts(name, int(gib * GIB)), gpu_table()[card]
    assert (found.name, found.bf16, found.doubt > 0) == (card, row.bf16, True)
    assert found.tflops / row.tflops == pytest.approx(computing, rel=0.05)
    assert found.memory_gb_per_s / row.memory_gb_per_s == pytest.approx(of_memory, rel=0.05)
    assert found.whence.endswith(f"of those of {card}, of which it is a slice")


@pytest.mark.parametrize(
    ("name", "gib", "card"),
    [
        ("GRID A100D-40C", 40, "a100-80gb"),
        ("GRID A100-20C", 20, "a100-40gb"),
        ("NVIDIA H100XM-80C", 80, "h100"),
        ("GRID V100D-8Q", 8, "v100-32gb"),
        ("NVIDIA A40-48Q", 45, "a40"),
    ],
)
def test_a_virtual_part_is_its_card(name: str, gib: int, card: str) -> None:
    found, row = unlisted_gpu_facts(name, gib * GIB), gpu_table()[card]
    assert (found.name, found.tflops, found.memory_gb_per_s) == (card, row.tflops, row.memory_gb_per_s)


@pytest.mark.parametrize("name", ["h100", "rtx3090", "a100-80gb", "v100-32gb", "l4", "t4", "b200"])
def test_what_a_driver_says_gives_the_rates_of_the_table(name: str) -> None:
    row = gpu_table()[name]
    capability = {"h100": (9, 0), "rtx3090": (8, 6), "a100-80gb": (8, 0), "l4": (8, 9), "b200": (10, 0), "t4": (7, 5)}
    told = NvmlFigures(capability.get(name, (7, 0)), row.fp32_tflops, row.memory_gb_per_s)
    label = "NVIDIA GeForce" if name.startswith("rtx") else "Mystery"
    found = unlisted_gpu_facts(label, int(row.memory_gib * GIB), told)
    assert found.tflops == pytest.approx(row.tflops, rel=0.15)
    assert (found.fp32_tflops, found.memory_gb_per_s, found.bf16) == (row.fp32_tflops, row.memory_gb_per_s, row.bf16)
    assert 0 < found.doubt < 0.5


@pytest.mark.parametrize(
    ("name", "gib"), [("NVIDIA GX500", 275), ("Voodoo 2", 1), ("", 24), ("A + B", 40), ("NVIDIA RTX 9", 48)]
)
def test_of_what_nobody_knows_there_is_a_guess_of_a_gpu(name: str, gib: int) -> None:
    found = unlisted_gpu_facts(name, gib * GIB)
    assert found.doubt >= 1
    assert found.tflops >= min(row.tflops for row in gpu_table().values())
    assert found.memory_gib == gib


def test_main_memory_is_slow_memory() -> None:
    for told in (None, NvmlFigures((12, 1), 31.0)):
        assert unlisted_gpu_facts("NVIDIA GX10", 120 * GIB, told, unified=True).memory_gb_per_s < 400


def test_a_found_card_says_its_rates(driver: Driver) -> None:
    driver.cards = [Card("NVIDIA GX500", 80, capability=(9, 0), rates=(16896, 1980, 2619, 5120, 5, 18))]
    driver.write()
    told = driver_figures(driver.cards[0].uuid)
    assert told is not None
    assert dataclasses.astuple(told)[1:] == pytest.approx((66.9, 3352, 50, 450), rel=0.01)
    found = detect("auto", None)
    again = Hardware.from_json(found.to_json()).gpu_facts
    assert (found.facts, again) == (None, found.gpu_facts)
    assert again is not None
    assert (again.link, again.link_gb_per_s) == ("nvlink", 450)
    assert again.tflops == pytest.approx(989, rel=0.01)
    assert again.whence == "reckoned from what its driver says"


def test_a_card_that_says_little_and_a_driver_that_fails(driver: Driver) -> None:
    driver.cards = [Card("NVIDIA GX1", 24, capability=(7, 5))]
    driver.write()
    assert driver_figures(driver.cards[0].uuid) == NvmlFigures((7, 5))
    found = detect("auto", None)
    assert not found.bf16, "before Ampere"
    assert found.gpu_facts is not None
    driver.failing = {"nvmlDeviceGetCudaComputeCapability": 999}
    driver.write()
    assert driver_figures(driver.cards[0].uuid) is None
    assert detect("auto", None).gpu_facts == dataclasses.replace(found.gpu_facts, bf16=True)


def test_a_found_slice(driver: Driver) -> None:
    slices = [Slice("NVIDIA A100-SXM4-40GB MIG 2g.10gb", 9.75)]
    driver.cards = [Card("NVIDIA A100-SXM4-40GB", 40, capability=(8, 0), mig=True, slices=slices)]
    driver.write()
    facts = detect("auto", None).gpu_facts
    assert facts is not None
    assert facts.tflops == pytest.approx(312 * 2 / 7)
    assert Hardware("cpu", "NVIDIA H100", 1, GIB, None, GIB).gpu_facts is None

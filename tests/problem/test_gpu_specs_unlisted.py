"""GPUs that are no row of the table: slices, virtual parts, cards that nobody has entered."""

from __future__ import annotations

import pytest

from autotune.problem.gpu_specs import gpu_table, unlisted_gpu_facts
from autotune.problem.hardware import Hardware, detect
from autotune.util.units import GIB
from tests.fake_driver import Card, Driver, Slice


@pytest.mark.parametrize(
    ("name", "gib", "row"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 7g.80gb", 79, "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9.75, "t4"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.5, "a100-40gb"),
        ("NVIDIA GeForce RTX 9090", 24, "titan-rtx"),
    ],
)
def test_the_nearest_row_is_of_the_card_or_of_a_card_with_as_much_memory(name: str, gib: float, row: str) -> None:
    found = unlisted_gpu_facts(name, int(gib * GIB))
    assert (found.name, found.tflops, found.memory_gib) == (row, gpu_table()[row].tflops, pytest.approx(gib, abs=0.01))
    assert found.whence == f"those of {row}, the nearest listed"


@pytest.mark.parametrize(("name", "gib"), [("NVIDIA GX500", 275), ("NVIDIA RTX 9", 48)])
def test_of_what_nobody_knows_there_is_a_guess_of_a_gpu(name: str, gib: int) -> None:
    found = unlisted_gpu_facts(name, gib * GIB)
    assert found.doubt >= 1
    assert found.tflops >= min(row.tflops for row in gpu_table().values())
    assert found.memory_gib == gib


@pytest.mark.parametrize(("capability", "bf16"), [((9, 0), True), ((7, 5), False)])
def test_a_found_card_is_stored_by_its_name_and_computes_in_bf16_from_ampere_on(
    driver: Driver, capability: tuple[int, int], bf16: bool
) -> None:
    driver.show(Card("NVIDIA GX500", 80, capability=capability))
    found = detect("auto", None)
    assert (found.facts, found.rates, found.bf16) == (None, None, bf16)
    assert Hardware.from_json(found.to_json()).gpu_facts == found.gpu_facts


def test_a_found_slice(driver: Driver) -> None:
    slices = [Slice("NVIDIA A100-SXM4-40GB MIG 2g.10gb", 9.75)]
    driver.show(Card("NVIDIA A100-SXM4-40GB", 40, capability=(8, 0), mig=True, slices=slices))
    found = detect("auto", None)
    assert found.bf16
    assert found.gpu_facts == unlisted_gpu_facts(slices[0].name, found.memory_bytes)
    assert Hardware("cpu", "NVIDIA H100", 1, GIB, None, GIB).gpu_facts is None

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.predict.zero_memory import pinned_bytes
from autotune.util.units import GIB, MIB


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DS_PIN_MEMORY_BACKEND", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("size", "block"),
    [(0, 0), (1, 1), (3, 4), (4, 4), (17 * GIB, 32 * GIB), (32 * GIB, 32 * GIB), (32 * GIB + 1, 64 * GIB)],
)
def test_a_block_is_a_power_of_two(size: int, block: int) -> None:
    assert pinned_bytes(size) == block
    assert pinned_bytes(np.array([size, size])).tolist() == [block, block]


@pytest.mark.slow
@given(st.integers(1, 2**45))
def test_a_block_is_the_least_power_that_holds_it(size: int) -> None:
    block = int(pinned_bytes(size))
    assert size <= block < 2 * size
    assert block & (block - 1) == 0


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("key", ["pinned_max_round_threshold_mb", "pinned_max_cached_size_mb"])
def test_torchs_allocator_can_be_told_to_round_less(monkeypatch: pytest.MonkeyPatch, name: str, key: str) -> None:
    monkeypatch.setenv(name, f"expandable_segments:True,{key}:1024")
    assert pinned_bytes(np.array([900 * MIB, 1024 * MIB, 17 * GIB])).tolist() == [GIB, GIB, 17 * GIB]


def test_deepspeeds_own_allocator_rounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "Native")
    assert pinned_bytes(17 * GIB) == 17 * GIB


def test_the_installed_torch_rounds_and_reads_these_keys() -> None:
    """What is predicted here cannot run without a GPU: that the source still says so is the next best."""
    from pathlib import Path

    import torch

    header = Path(torch.__file__).parent / "include/ATen/core/CachingHostAllocator.h"
    assert "PowerOf2Ceil(size)" in header.read_text(), "pinned.py follows this file"
    library = (Path(torch.__file__).parent / "lib/libc10.so").read_bytes()
    for key in (b"pinned_max_round_threshold_mb", b"pinned_max_cached_size_mb"):
        assert key in library

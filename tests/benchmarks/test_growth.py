"""The bytes that the benchmark of the tuner's growth ascribes to its history, against those that the heaps gave out."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from benchmarks.reliability.growth import allocated_bytes, reachable_bytes

COUNT = 5_000


@dataclass(frozen=True)
class Kept:
    number: int
    seconds: float
    name: str
    bounds: tuple[float, float]
    config: dict[str, int]
    losses: list[float]
    failed: set[int]


def kept(n: int) -> list[Any]:
    one = Kept(n, n * 1.5, f"trial {n} of a study", (n + 0.1, n + 0.2), {"stage": n, f"key{n}": 2}, [n + 0.5], {n})
    return [one, np.full(100, n)]


@pytest.mark.slow
def test_the_history_is_counted_as_the_heaps_give_it_out() -> None:
    before = [kept(10**6 + n) for n in range(500)]  # takes what is free in the heaps
    gc.collect()
    at_first = allocated_bytes()
    history = [kept(n) for n in range(1000, 1000 + COUNT)]
    gc.collect()
    given_out = allocated_bytes() - at_first
    reading, writing = os.pipe()
    if not os.fork():
        os.write(writing, str(reachable_bytes(history, set())).encode())
        os._exit(0)
    os.wait()
    os.close(writing)
    with open(reading) as told:
        counted = int(told.read())
    assert abs(counted / given_out - 1) < 0.1, (counted, given_out, len(before))

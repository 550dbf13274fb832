"""Machines that would suffice for a job: the fewest GPUs of a card, and a comparison of all cards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from autotune.commands.setup import PlanSetup
from autotune.predict.elsewhere import Elsewhere, Tried
from autotune.problem.hardware import Hardware, gpu_table, named_hardware
from autotune.problem.prices import Price, price_table
from autotune.results.plan import CardPlan, Outlook

PER_NODE = 8  # GPUs in rented machines; smaller ones have 1, 2 or 4
LONGEST_SECONDS = 30 * 24 * 3600.0  # longer trainings are rejected at any price
_SIZES = ((1, 1), (2, 1), (4, 1), (PER_NODE, 1))  # (GPUs, nodes)
_MORE = tuple((PER_NODE * nodes, nodes) for nodes in (2, 4, 8))  # tried only if one machine is not enough
_EXACT = (*((gpus, 1) for gpus in range(1, PER_NODE + 1)), *((PER_NODE * nodes, nodes) for nodes in range(2, 33)))


class Machines:
    """Predictions of one job on any number of any card."""

    def __init__(self, setup: PlanSetup, elsewhere: Elsewhere) -> None:
        self.setup, self.elsewhere = setup, elsewhere
        self._tried: dict[tuple[str, int, int], Tried | None] = {}

    def cards(self) -> tuple[CardPlan, ...]:
        """Return every card of the table: by cost per token, then those without a price, then those on which nothing fits."""
        found = [self._card(name) for name in gpu_table()]
        return tuple(sorted(found, key=_rank))

    def fewest_of_own(self) -> CardPlan | None:
        """Return the fewest of the setup's own card: any number within a machine, then whole machines."""
        hardware = self.setup.hardware
        if hardware.facts is None:
            return None
        fewest = fewest_offloading = None
        for one in self._sizes(hardware.facts, _EXACT):
            fewest = self.outlook(one, one.fastest(offload=False))
            if fewest:
                break
            fewest_offloading = fewest_offloading or self.outlook(one, one.fastest(any_host=True))
        return CardPlan(hardware.facts, fewest, fewest_offloading, None)

    def outlook(self, tried: Tried | None, place: int | None) -> Outlook | None:
        """Return the outlook of one candidate of a trial setup."""
        if tried is None or place is None:
            return None
        price = self.price(tried.hardware)
        return Outlook(tried.prediction(place), tried.job, tried.hardware, self.setup.tokens, price)

    def fastest(self, tried: Tried | None) -> Outlook | None:
        """Return the outlook of the fastest candidate that fits."""
        return self.outlook(tried, tried.fastest() if tried else None)

    def price(self, hardware: Hardware) -> Price | None:
        """Return the price of one GPU: the setup's for its own card, else from `data/prices.json`."""
        if hardware.facts == self.setup.hardware.facts:
            return self.setup.price
        return price_table().get(hardware.facts or "")

    def of(self, name: str, gpus: int, nodes: int) -> Hardware:
        """Return `gpus` of a card, with the setup's headroom and, if it was typed, its main memory."""
        mine = self.setup.hardware
        typed = None if self.setup.host_assumed else mine.host_memory_bytes
        hardware = named_hardware(name, gpus, headroom=mine.headroom, host_memory_bytes=typed, nodes=nodes)
        if name == mine.facts:  # the setup's own card may be capped, or partly in use
            same = ("memory_bytes", "memory_cap_bytes", "taken_bytes", "rates")
            hardware = dataclasses.replace(hardware, **{field: getattr(mine, field) for field in same})
        return hardware

    def _card(self, name: str) -> CardPlan:
        whole = self.tried(name, PER_NODE, 1)
        hopeless = whole is not None and whole.fastest(any_host=True) is None  # fewer would not suffice either
        found = self._plan(name, _SIZES[-1:] if hopeless else _SIZES)
        return found if found.best else self._plan(name, _MORE)

    def _plan(self, name: str, sizes: Iterable[tuple[int, int]]) -> CardPlan:
        """Return the card's plan in machines of these sizes, in ascending order."""
        fewest = fewest_offloading = None
        best: tuple[tuple[bool, float], Tried, int] | None = None
        for one in self._sizes(name, sizes):
            fewest = fewest or self.outlook(one, one.fastest(offload=False))
            fewest_offloading = fewest_offloading or fewest or self.outlook(one, one.fastest(any_host=True))
            place = one.fastest()
            if place is not None:
                samples = float(one.table.samples[place])
                long = self.setup.tokens / (samples * one.job.tokens_per_sample) > LONGEST_SECONDS
                # GPUs per (sample per second): proportional to the cost of a token at any GPU price
                cost = long, one.hardware.count / samples
                if best is None or cost < best[0]:
                    best = cost, one, place
        if fewest_offloading is fewest:
            fewest_offloading = None
        return CardPlan(name, fewest, fewest_offloading, self.outlook(best[1], best[2]) if best else None)

    def tried(self, name: str, gpus: int, nodes: int) -> Tried | None:
        """Return the setup's job on `gpus` of a card; None if its global batch cannot be split over them."""
        job = self.setup.job
        if job.precision == "bf16" and not gpu_table()[name].bf16 and not self.setup.precision_typed:
            job = dataclasses.replace(job, precision="fp16")
        key = name, gpus, nodes
        if key not in self._tried:
            self._tried[key] = self.elsewhere.on(self.of(*key), job)
        return self._tried[key]

    def _sizes(self, name: str, sizes: Iterable[tuple[int, int]]) -> Iterator[Tried]:
        return (found for size in sizes if (found := self.tried(name, *size)))


def _rank(card: CardPlan) -> tuple[bool, bool, float, str]:
    cost = card.best.usd if card.best else None
    long = card.best is not None and 3600 * card.best.hours > LONGEST_SECONDS
    return card.best is None, long, cost if cost is not None else float("inf"), card.gpu

"""Which machines would do: the fewest GPUs of a card, and every card side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from autotune.commands.setup import PlanSetup
from autotune.predict.elsewhere import Elsewhere, Tried
from autotune.problem.hardware import Hardware, gpu_table, named_hardware
from autotune.problem.prices import Price, price_table
from autotune.results.plan import CardPlan, Outlook

PER_NODE = 8  # GPUs in the machines that are rented; smaller ones have 1, 2 or 4
LONGEST_SECONDS = 30 * 24 * 3600.0  # what takes longer is no choice, however cheap
_SIZES = ((1, 1), (2, 1), (4, 1), (PER_NODE, 1))  # (GPUs, nodes)
_MORE = tuple((PER_NODE * nodes, nodes) for nodes in (2, 4, 8))  # only where one machine is not enough
_EXACT = (*((gpus, 1) for gpus in range(1, PER_NODE + 1)), *((PER_NODE * nodes, nodes) for nodes in range(2, 33)))


class Machines:
    """What one job would be on any number of any card."""

    def __init__(self, setup: PlanSetup, elsewhere: Elsewhere) -> None:
        self.setup, self.elsewhere = setup, elsewhere
        self._tried: dict[tuple[str, int, int], Tried | None] = {}

    def cards(self) -> tuple[CardPlan, ...]:
        """Every card of the table: cheapest a token first, then those without a price, then those on which nothing fits."""
        found = [self._card(name) for name in gpu_table()]
        return tuple(sorted(found, key=_rank))

    def fewest_of_own(self) -> CardPlan | None:
        """The fewest of the setup's own card, counted one by one within a machine and by whole machines beyond."""
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
        """Of one of what was tried."""
        if tried is None or place is None:
            return None
        price = self.price(tried.hardware)
        return Outlook(tried.prediction(place), tried.job, tried.hardware, self.setup.tokens, price)

    def fastest(self, tried: Tried | None) -> Outlook | None:
        """Of what was tried the fastest that fits."""
        return self.outlook(tried, tried.fastest() if tried else None)

    def price(self, hardware: Hardware) -> Price | None:
        """Of one GPU: as the setup says for its own card, else as `data/prices.json` has it."""
        if hardware.facts == self.setup.hardware.facts:
            return self.setup.price
        return price_table().get(hardware.facts or "")

    def of(self, name: str, gpus: int, nodes: int) -> Hardware:
        """So many of a card, with the setup's headroom and, where it was typed, its main memory."""
        mine = self.setup.hardware
        typed = None if self.setup.host_assumed else mine.host_memory_bytes
        hardware = named_hardware(name, gpus, headroom=mine.headroom, host_memory_bytes=typed, nodes=nodes)
        if name == mine.facts:  # a card as the setup has it: capped, or partly taken
            same = ("memory_bytes", "memory_cap_bytes", "taken_bytes", "rates")
            hardware = dataclasses.replace(hardware, **{field: getattr(mine, field) for field in same})
        return hardware

    def _card(self, name: str) -> CardPlan:
        whole = self.tried(name, PER_NODE, 1)
        hopeless = whole is not None and whole.fastest(any_host=True) is None  # fewer would not do either
        found = self._plan(name, _SIZES[-1:] if hopeless else _SIZES)
        return found if found.best else self._plan(name, _MORE)

    def _plan(self, name: str, sizes: Iterable[tuple[int, int]]) -> CardPlan:
        """The card in machines of these sizes, which ascend."""
        fewest = fewest_offloading = None
        best: tuple[tuple[bool, float], Tried, int] | None = None
        for one in self._sizes(name, sizes):
            fewest = fewest or self.outlook(one, one.fastest(offload=False))
            fewest_offloading = fewest_offloading or fewest or self.outlook(one, one.fastest(any_host=True))
            place = one.fastest()
            if place is not None:
                samples = float(one.table.samples[place])
                long = self.setup.tokens / (samples * one.job.tokens_per_sample) > LONGEST_SECONDS
                # GPUs for so many samples a second: what a token costs, whatever a GPU does
                cost = long, one.hardware.count / samples
                if best is None or cost < best[0]:
                    best = cost, one, place
        if fewest_offloading is fewest:
            fewest_offloading = None
        return CardPlan(name, fewest, fewest_offloading, self.outlook(best[1], best[2]) if best else None)

    def tried(self, name: str, gpus: int, nodes: int) -> Tried | None:
        """The setup's job on so many of a card; None where its global batch cannot be split over them."""
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

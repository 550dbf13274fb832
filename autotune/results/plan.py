"""A plan: what is predicted to fit, how fast it would be and what it would cost, what limits it and what would help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.predict.elsewhere import host_bytes_per_node
from autotune.predict.flops import model_flops_per_token
from autotune.predict.known_error import KnownErrors
from autotune.predict.prediction import Prediction
from autotune.problem.candidate import under
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.prices import Price

TOKENS = 1e9  # what hours and costs are told for where nobody says
Interval = tuple[float, float]


@dataclass(frozen=True)
class Outlook:
    """What a prediction means for a training of so many tokens. Intervals hold 95 % and come from the step's alone."""

    prediction: Prediction
    job: Job
    hardware: Hardware
    tokens: float
    price: Price | None  # of one GPU; None: unknown

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together, padding not counted."""
        return self.prediction.samples_per_second * self.job.tokens_per_sample

    @property
    def tokens_interval(self) -> Interval:
        """In tokens a second."""
        fast, slow = self.prediction.step_interval
        step = self.prediction.step_seconds
        return self.tokens_per_second * step / slow, self.tokens_per_second * step / fast

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over what the devices could compute, recomputation not counted; None where either is unknown or
        only estimated."""
        flops = model_flops_per_token(under(self.job, self.prediction.candidate))
        card = self.hardware.gpu_facts
        if not flops or card is None or card.doubt:
            return None
        peak = card.fp32_tflops if self.job.precision == "fp32" else card.tflops
        return flops * self.tokens_per_second / self.hardware.count / (peak * 1e12)

    @property
    def mfu_interval(self) -> Interval | None:
        """As shares, like `mfu`."""
        return self._scaled(self.mfu)

    @property
    def hours(self) -> float:
        """For all the tokens, without evaluations, saves and starts."""
        return self.tokens / self.tokens_per_second / 3600

    @property
    def hours_interval(self) -> Interval:
        slow, fast = self.tokens_interval
        return self.tokens / fast / 3600, self.tokens / slow / 3600

    @property
    def usd_per_hour(self) -> float | None:
        """Of all GPUs."""
        return self.price.usd_per_hour * self.hardware.count if self.price else None

    @property
    def usd(self) -> float | None:
        """For all the tokens; the price is taken as exact."""
        return self.usd_per_hour * self.hours if self.usd_per_hour is not None else None

    @property
    def usd_interval(self) -> Interval | None:
        if self.usd_per_hour is None:
            return None
        low, high = self.hours_interval
        return self.usd_per_hour * low, self.usd_per_hour * high

    @property
    def host_bytes(self) -> float:
        """Main memory that each node needs."""
        return host_bytes_per_node(self.prediction.host_bytes, self.hardware)

    def _scaled(self, value: float | None) -> Interval | None:
        """The interval of what is proportional to speed."""
        if value is None:
            return None
        low, high = self.tokens_interval
        return value * low / self.tokens_per_second, value * high / self.tokens_per_second

    def to_json(self) -> dict[str, Any]:
        """For programs; bytes, seconds, shares and dollars, null where something is not known."""
        one = self.prediction
        return {
            "gpu": self.hardware.name,
            "gpus": self.hardware.count,
            "nodes": self.hardware.nodes,
            "candidate": one.candidate.as_dict,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_interval": list(self.tokens_interval),
            "mfu": self.mfu,
            "mfu_interval": list(self.mfu_interval) if self.mfu_interval else None,
            "peak_bytes": round(one.peak_bytes),
            "peak_interval": [round(v) for v in one.peak_interval],
            "chance": round(one.chance, 3),
            "host_bytes_per_node": round(self.host_bytes),
            "tokens": self.tokens,
            "hours": self.hours,
            "hours_interval": list(self.hours_interval),
            "usd_per_gpu_hour": self.price.usd_per_hour if self.price else None,
            "price_source": f"{self.price.source}, {self.price.date}".rstrip(", ") if self.price else None,
            "usd": self.usd,
            "usd_interval": list(self.usd_interval) if self.usd_interval else None,
            "binding": one.binding,
        }


@dataclass(frozen=True)
class StagePlan:
    """The largest micro-batch of one ZeRO stage that surely fits, with as little else as the space allows, and what would let
    the next one fit."""

    stage: int
    fitting: Prediction | None  # None: not even one sequence fits
    smallest: Prediction  # at micro-batch 1
    unlocks: list[str]
    helped: Prediction | None = (
        None  # where not even one does: the stage's best with checkpointing, offload and the like
    )

    @property
    def shown(self) -> Prediction:
        """What stands for the stage."""
        return self.fitting or self.helped or self.smallest


@dataclass(frozen=True)
class HostNeed:
    """Main memory that a node needs where something is offloaded to it, at micro-batch 1."""

    stage: int
    parameters: bool  # too, not only the optimizer
    bytes_per_node: float
    fits_device: bool  # with so much main memory


@dataclass(frozen=True)
class CardPlan:
    """One kind of card: the fewest of them that are enough, and the number that trains a token for the least money."""

    gpu: str
    fewest: Outlook | None  # that hold it all; None: none of those tried do
    fewest_offloading: Outlook | None  # the same with the help of main memory, however much that takes
    best: (
        Outlook | None
    )  # cheapest, or without a price fastest per GPU, of 1 to 8 and, where those are too few, of more


@dataclass(frozen=True)
class Gain:
    """A change to machine or job, and the speed that is predicted with it over that without, minus one."""

    what: str
    share: float
    usd_share: float | None = None  # the same of the cost a token
    detail: str = ""


@dataclass(frozen=True)
class Plan:
    """What is predicted for one job on one machine; `best` is fastest first, or likeliest where nothing surely fits."""

    job: Job
    hardware: Hardware
    best: list[Prediction]
    stages: list[StagePlan]
    note: str
    tokens: float = TOKENS
    price: Price | None = None
    host: tuple[HostNeed, ...] = ()
    host_assumed: bool = False  # main memory was neither measured nor given
    own: CardPlan | None = None  # of the card asked for, its `fewest` exact
    cards: tuple[CardPlan, ...] = ()  # of all cards, cheapest first, those without a price last
    gains: tuple[Gain, ...] = ()  # best first
    errors: KnownErrors | None = None  # of the fastest, or of the smallest that does not fit

    @property
    def outlook(self) -> Outlook | None:
        """Of the fastest that fits."""
        return Outlook(self.best[0], self.job, self.hardware, self.tokens, self.price) if self.best else None

    def to_json(self) -> dict[str, Any]:
        outlook = self.outlook
        return {
            "model": self.job.model.name,
            "gpu": self.hardware.name,
            "gpus": self.hardware.count,
            "nodes": self.hardware.nodes,
            "gpus_per_node": self.hardware.per_node,
            "seq_len": self.job.seq_len,
            "precision": self.job.precision,
            "global_batch_size": self.job.global_batch_size,
            "capacity_bytes": self.hardware.capacity_bytes,
            "host_memory_bytes_per_node": self.hardware.host_memory_bytes,
            "host_memory_assumed": self.host_assumed,
            "best": [prediction_json(one, self.job) for one in self.best],
            "outlook": outlook.to_json() if outlook else None,
            "measured_error": self.errors.to_json() if self.errors else None,
            "stages": [
                {
                    "stage": one.stage,
                    "largest_micro_batch": one.fitting.candidate.micro_batch if one.fitting else None,
                    "prediction": prediction_json(one.shown, self.job),
                    "with_help": prediction_json(one.helped, self.job) if one.helped else None,
                    "unlocks": one.unlocks,
                }
                for one in self.stages
            ],
            "would_help": [vars(gain) for gain in self.gains],
            "offload": [{**vars(need), "bytes_per_node": round(need.bytes_per_node)} for need in self.host],
            "fewest_gpus": card_json(self.own) if self.own else None,
            "cards": [card_json(card) for card in self.cards],
            "note": self.note,
        }


def card_json(card: CardPlan) -> dict[str, Any]:
    """For programs; null is where nothing fits."""
    named = {"fewest": card.fewest, "fewest_offloading": card.fewest_offloading, "best": card.best}
    return {"gpu": card.gpu, **{name: one.to_json() if one else None for name, one in named.items()}}


def prediction_json(one: Prediction, job: Job) -> dict[str, Any]:
    """A Prediction for programs; bytes, seconds and samples a second."""
    return {
        "candidate": one.candidate.as_dict,
        "ds_config": one.candidate.ds_config(job),
        "fits": one.fits,
        "chance": round(one.chance, 3),
        "peak_bytes": round(one.peak_bytes),
        "peak_interval": [round(v) for v in one.peak_interval],
        "memory": {name: round(value) for name, value in one.memory.items()},
        "moment": one.moment,
        "host_bytes_per_rank": round(one.host_bytes),
        "step_seconds": one.step_seconds,
        "step_interval": list(one.step_interval),
        "time": one.time,
        "samples_per_second": one.samples_per_second,
        "tokens_per_second": one.samples_per_second * job.tokens_per_sample,
        "binding": one.binding,
    }

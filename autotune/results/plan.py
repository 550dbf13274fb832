"""A plan: predictions of what fits, its speed and cost, what limits it and what would help."""

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

TOKENS = 1e9  # default tokens for hours and costs
Interval = tuple[float, float]


@dataclass(frozen=True)
class Outlook:
    """Speed, time and cost of a training over `tokens`, from a prediction. Intervals hold 95 % and reflect the step time
    alone."""

    prediction: Prediction
    job: Job
    hardware: Hardware
    tokens: float
    price: Price | None  # of one GPU; None: unknown

    @property
    def tokens_per_second(self) -> float:
        """All ranks together, padding not counted."""
        return self.prediction.samples_per_second * self.job.tokens_per_sample

    @property
    def tokens_interval(self) -> Interval:
        """Interval in tokens per second."""
        fast, slow = self.prediction.step_interval
        step = self.prediction.step_seconds
        return self.tokens_per_second * step / slow, self.tokens_per_second * step / fast

    @property
    def mfu(self) -> float | None:
        """Model FLOPs as a share of the devices' peak, recomputation not counted; None if either is unknown or only
        estimated."""
        flops = model_flops_per_token(under(self.job, self.prediction.candidate))
        card = self.hardware.gpu_facts
        if not flops or card is None or card.doubt:
            return None
        peak = card.fp32_tflops if self.job.precision == "fp32" else card.tflops
        return flops * self.tokens_per_second / self.hardware.count / (peak * 1e12)

    @property
    def mfu_interval(self) -> Interval | None:
        """Interval as shares, like `mfu`."""
        return self._scaled(self.mfu)

    @property
    def hours(self) -> float:
        """Hours for all tokens, without evaluations, saves and starts."""
        return self.tokens / self.tokens_per_second / 3600

    @property
    def hours_interval(self) -> Interval:
        slow, fast = self.tokens_interval
        return self.tokens / fast / 3600, self.tokens / slow / 3600

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all GPUs."""
        return self.price.usd_per_hour * self.hardware.count if self.price else None

    @property
    def usd(self) -> float | None:
        """Cost of all tokens; the price is taken as exact."""
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
        """Return the interval of a value proportional to speed."""
        if value is None:
            return None
        low, high = self.tokens_interval
        return value * low / self.tokens_per_second, value * high / self.tokens_per_second

    def to_json(self) -> dict[str, Any]:
        """Return the outlook for JSON: bytes, seconds, shares and dollars; null if unknown."""
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
    """Largest micro-batch of one ZeRO stage that surely fits with the fewest memory savers, and changes that would let the
    next size fit."""

    stage: int
    fitting: Prediction | None  # None: not even one sequence fits
    smallest: Prediction  # at micro-batch 1
    unlocks: list[str]
    helped: Prediction | None = (
        None  # if not even one sequence fits: the stage's best with checkpointing, offload and the like
    )

    @property
    def shown(self) -> Prediction:
        """The prediction that represents the stage."""
        return self.fitting or self.helped or self.smallest


@dataclass(frozen=True)
class HostNeed:
    """Main memory that a node needs for offload, at micro-batch 1."""

    stage: int
    parameters: bool  # parameters too, not only the optimizer
    bytes_per_node: float
    fits_device: bool  # with that much main memory


@dataclass(frozen=True)
class CardPlan:
    """One kind of card: the smallest sufficient number, and the number with the lowest cost per token."""

    gpu: str
    fewest: Outlook | None  # smallest number that holds everything; None: no tried number does
    fewest_offloading: Outlook | None  # smallest number with offload, with unlimited main memory
    best: Outlook | None  # cheapest, or without a price fastest per GPU, of 1 to 8, or of more if those are too few


@dataclass(frozen=True)
class Gain:
    """A change to machine or job: its predicted speed relative to the speed without it, minus one."""

    what: str
    share: float
    usd_share: float | None = None  # relative change of the cost per token
    detail: str = ""


@dataclass(frozen=True)
class Plan:
    """Predictions for one job on one machine. `best` is fastest first, or likeliest first if nothing surely fits."""

    job: Job
    hardware: Hardware
    best: list[Prediction]
    stages: list[StagePlan]
    note: str
    tokens: float = TOKENS
    price: Price | None = None
    host: tuple[HostNeed, ...] = ()
    host_assumed: bool = False  # main memory was neither measured nor given
    own: CardPlan | None = None  # for the requested card, with an exact `fewest`
    cards: tuple[CardPlan, ...] = ()  # all cards, cheapest first, those without a price last
    gains: tuple[Gain, ...] = ()  # best first
    errors: KnownErrors | None = None  # for the fastest, or for the smallest that does not fit

    @property
    def outlook(self) -> Outlook | None:
        """Outlook of the fastest that fits."""
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
    """Return a CardPlan for JSON; null if nothing fits."""
    named = {"fewest": card.fewest, "fewest_offloading": card.fewest_offloading, "best": card.best}
    return {"gpu": card.gpu, **{name: one.to_json() if one else None for name, one in named.items()}}


def prediction_json(one: Prediction, job: Job) -> dict[str, Any]:
    """Return a Prediction for JSON: bytes, seconds and samples per second."""
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

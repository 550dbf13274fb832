"""Plan data, as JSON and as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Column, Table
from rich.text import Text

from autotune.masking import masked_data
from autotune.predict.predictor import Prediction
from autotune.predict.step_time import model_flops_per_token
from autotune.predict.what_if import host_bytes_per_node, is_published
from autotune.problem.candidate import LOSS, Candidate, describe, job_with_candidate
from autotune.problem.gpu_specs import Price, cloud_machines
from autotune.problem.hardware import Hardware
from autotune.problem.job import FULL, SEQUENCE_RANKS, Job
from autotune.problem.knobs import FIRST_ORDER, OFFLOAD_RATIO
from autotune.results.console import config_sentence, sync_note
from autotune.results.tables import DataTable
from autotune.util.files import write_atomically
from autotune.util.units import GIB, format_bytes, format_count, format_hours, format_usd, parse_share

# -- plan --------------------------------------------------------------------------------------------------------------
#
# A plan: predictions of what fits, its speed and cost, and what limits it.

TOKENS = 1e9  # default tokens for hours and costs
Interval = tuple[float, float]


@dataclass(frozen=True)
class Outlook:
    """Speed, time and cost of a training over `tokens`, from a prediction.

    Intervals hold 95 % and reflect the step time alone.
    """

    prediction: Prediction
    job: Job
    hardware: Hardware
    tokens: float
    price: Price | None  # of one GPU; None: unknown

    @property
    def tokens_per_second(self) -> float:
        """All ranks together, padding not counted."""
        return self.prediction.samples_per_second * self.job.tokens_per_sample

    def by_speed(self, value: float | None) -> Interval | None:
        """Return the interval of a value that is proportional to the speed; None for an unknown one."""
        fast, slow = self.prediction.step_interval
        step = self.prediction.step_seconds
        return None if value is None else (value * step / slow, value * step / fast)

    def by_time(self, value: float | None) -> Interval | None:
        """Return the interval of a value that is proportional to the time of a step; None for an unknown one."""
        fast, slow = self.prediction.step_interval
        step = self.prediction.step_seconds
        return None if value is None else (value * fast / step, value * slow / step)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs as a share of the devices' peak, recomputation not counted.

        None if either is unknown or only estimated.
        """
        flops = model_flops_per_token(job_with_candidate(self.job, self.prediction.candidate))
        peak = self.hardware.peak_tflops(self.job.precision)
        if not flops or peak is None:
            return None
        return flops * self.tokens_per_second / self.hardware.count / (peak * 1e12)

    @property
    def hours(self) -> float:
        """Hours for all tokens, without evaluations, saves and starts."""
        return self.tokens / self.tokens_per_second / 3600

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all GPUs."""
        return self.price.usd_per_hour * self.hardware.count if self.price else None

    @property
    def usd(self) -> float | None:
        """Cost of all tokens; the price is taken as exact."""
        return self.usd_per_hour * self.hours if self.usd_per_hour is not None else None

    @property
    def host_bytes(self) -> float:
        """Main memory that each node needs."""
        return host_bytes_per_node(self.prediction.host_bytes, self.hardware)

    def to_json(self) -> dict[str, Any]:
        """Return the outlook for JSON: bytes, seconds, shares and dollars; null if unknown."""
        one = self.prediction
        return {
            "gpu": self.hardware.name,
            "gpus": self.hardware.count,
            "nodes": self.hardware.nodes,
            "candidate": one.candidate.as_dict,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_interval": self.by_speed(self.tokens_per_second),
            "mfu": self.mfu,
            "mfu_interval": self.by_speed(self.mfu),
            "peak_bytes": round(one.peak_bytes),
            "peak_interval": [round(v) for v in one.peak_interval],
            "chance": round(one.chance, 3),
            "host_bytes_per_node": round(self.host_bytes),
            "tokens": self.tokens,
            "hours": self.hours,
            "hours_interval": self.by_time(self.hours),
            "usd_per_gpu_hour": self.price.usd_per_hour if self.price else None,
            "price_source": f"{self.price.source}, {self.price.date}".rstrip(", ") if self.price else None,
            "usd": self.usd,
            "usd_interval": self.by_time(self.usd),
            "binding": one.binding,
        }


@dataclass(frozen=True)
class Shortage:
    """Memory that a config needs to fit with the probability SURE, and the memory that it may use."""

    gpu_needed_bytes: float  # of one GPU
    gpu_usable_bytes: float  # capacity less headroom
    host_needed_bytes: float  # of a node, its processes included; 0 without offload
    host_bytes: float  # of a node

    @classmethod
    def of(cls, one: Prediction, hardware: Hardware) -> Shortage:
        """Return the shortage of a prediction on its hardware."""
        host = host_bytes_per_node(one.host_bytes, hardware) if one.host_bytes else 0.0
        return cls(one.sure_bytes, hardware.ceiling_bytes, host, hardware.host_memory_bytes)

    @property
    def gpu_short_bytes(self) -> float:
        """Bytes that each GPU lacks."""
        return max(0.0, self.gpu_needed_bytes - self.gpu_usable_bytes)

    @property
    def host_short_bytes(self) -> float:
        """Bytes of main memory that each node lacks."""
        return max(0.0, self.host_needed_bytes - self.host_bytes)

    def __str__(self) -> str:
        lacks = [(self.gpu_short_bytes, "a GPU"), (self.host_short_bytes, "of main memory a node")]
        return "short of " + " and ".join(f"{_gib_number(size)} GiB {where}" for size, where in lacks if size)


# words for a way to train, by (checkpointing, offload)
_WAYS = {(False, False): "plain", (False, True): "+ offload", (True, False): "+ checkpointing", (True, True): "+ both"}


@dataclass(frozen=True)
class WayPlan:
    """One way to train: a ZeRO stage, with or without activation checkpointing and offload to main memory.

    `largest` and `fastest` surely fit; without any, `closest` is the config of this way that lacks the least memory.
    """

    stage: int
    checkpointing: bool
    offload: bool
    largest: Prediction | None  # of those with the largest micro-batch, the fastest
    fastest: Prediction | None
    closest: Prediction | None

    @property
    def shown(self) -> Prediction:
        """The prediction that represents this way."""
        found = self.largest or self.closest
        assert found is not None
        return found

    def __str__(self) -> str:
        return _WAYS[self.checkpointing, self.offload]


@dataclass(frozen=True)
class CardPlan:
    """One kind of card: the smallest sufficient number, and the number with the lowest cost per token."""

    gpu: str
    fewest: Outlook | None  # smallest number that holds everything; None: no tried number does
    fewest_offloading: (
        Outlook | None
    )  # smallest number with offload, in the main memory of the plan or of the card's common machine
    best: Outlook | None  # cheapest, or without a price fastest per GPU, of 1 to 8, or of more if those are too few

    def to_json(self) -> dict[str, Any]:
        """Return the card for JSON; null if nothing fits."""
        named = {"fewest": self.fewest, "fewest_offloading": self.fewest_offloading, "best": self.best}
        outlooks = {name: one and one.to_json() for name, one in named.items()}
        return {"gpu": self.gpu, **outlooks}


@dataclass(frozen=True, repr=False)
class Plan:
    """Predictions for one job on one machine. `best` is fastest first, or likeliest first if nothing surely fits."""

    job: Job
    hardware: Hardware
    best: list[Prediction]
    # by stage: plain, with checkpointing, with offload, with both, as far as the space has them
    ways: tuple[WayPlan, ...]
    notes: tuple[str, ...]
    tokens: float = TOKENS
    price: Price | None = None
    closest: Prediction | None = None  # if nothing fits: the config that lacks the least memory
    shared: Outlook | None = None  # if nothing fits: the fewest GPUs with which it does if they share each sequence
    with_host: Prediction | None = None  # if nothing fits: the config that would fit with the least main memory
    host_assumed: bool = False  # main memory was neither measured nor given
    batch_assumed: bool = False  # the global batch was neither given nor in a config
    loading_bytes: float = 0.0  # main memory of a node while each rank loads a copy of the weights; 0: no copy is made
    zero_init_bytes: float = 0.0  # the same if zero.Init divides one copy over the ranks
    whole_bytes: float = 0.0  # of all weights on a GPU while ZeRO-3 is made without zero.Init; 0: never whole
    save_bytes: float = 0.0  # main memory of the first node while ZeRO-3 gathers all weights for a save
    whole_loss: Prediction | None = None  # the fastest that makes all logits; None: none fits
    own: CardPlan | None = None  # for the requested card, with an exact `fewest_gpus`
    cards: tuple[CardPlan, ...] = ()  # cheapest first; those without a price last

    def __repr__(self) -> str:
        """Return the job, the machine and the fastest config in one line."""
        outlook = self.outlook
        found = "nothing fits"
        if outlook is not None:
            found = f"{outlook.prediction.candidate} at {rate(outlook.tokens_per_second)} tokens/s"
        return f"<Plan of {self.job.summary}, on {self.hardware}: {found}>"

    @property
    def outlook(self) -> Outlook | None:
        """Outlook of the fastest that fits."""
        return Outlook(self.best[0], self.job, self.hardware, self.tokens, self.price) if self.best else None

    def to_json(self, whole: bool = False) -> dict[str, Any]:
        """Return the plan's answer as JSON data; `whole` adds every prediction."""
        answer = self.outlook and {**(prediction_json(self.best[0], self.job) or {}), **self.outlook.to_json()}
        data = {
            "model": self.job.model.name,
            "gpu": self.hardware.name,
            "gpus": self.hardware.count,
            "nodes": self.hardware.nodes,
            "gpus_per_node": self.hardware.per_node,
            "seq_len": self.job.seq_len,
            "precision": self.job.precision,
            "global_batch_size": self.job.global_batch_size,
            "global_batch_assumed": self.batch_assumed,
            "capacity_bytes": self.hardware.capacity_bytes,
            "host_memory_bytes_per_node": self.hardware.host_memory_bytes,
            "host_memory_assumed": self.host_assumed,
            "answer": answer,
            "closest": self._lacking_json(self.closest),
            "notes": self.notes,
        }
        return {**data, **self._others_json()} if whole else data

    def _others_json(self) -> dict[str, Any]:
        return {
            "best": [prediction_json(one, self.job) for one in self.best],
            "ways": [
                {
                    "stage": way.stage,
                    "checkpointing": way.checkpointing,
                    "offload": way.offload,
                    "largest": prediction_json(way.largest, self.job),
                    "fastest": prediction_json(way.fastest, self.job),
                    "closest": self._lacking_json(way.closest),
                }
                for way in self.ways
            ],
            "fits_with_host_memory": self._lacking_json(self.with_host),
            "fits_with_shared_sequences": self.shared
            and {SEQUENCE_RANKS: self.shared.job.sequence_ranks, **self.shared.to_json()},
            "fastest_with_all_logits": prediction_json(self.whole_loss, self.job),
            "loading_bytes_per_node": round(self.loading_bytes),
            "loading_bytes_with_zero_init": round(self.zero_init_bytes),
            "initialize_bytes_without_zero_init": round(self.whole_bytes),
            "save_bytes_on_first_node": round(self.save_bytes),
            "fewest_gpus": self.own and self.own.to_json(),
            "cards": [card.to_json() for card in self.cards],
        }

    def _lacking_json(self, one: Prediction | None) -> dict[str, Any] | None:
        found = prediction_json(one, self.job)
        if one is None or found is None:
            return None
        shortage = Shortage.of(one, self.hardware)
        return {
            **found,
            "needed_bytes": round(shortage.gpu_needed_bytes),
            "short_bytes": round(shortage.gpu_short_bytes),
            "host_bytes_per_node": round(shortage.host_needed_bytes),
            "host_short_bytes_per_node": round(shortage.host_short_bytes),
        }


def prediction_json(one: Prediction | None, job: Job) -> dict[str, Any] | None:
    """Return a Prediction for JSON: bytes, seconds and samples per second; null without one."""
    if one is None:
        return None
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


# -- plan view ---------------------------------------------------------------------------------------------------------
#
# Print a plan: the answer first, then what limits it, and which machines would do.

_DECIDING = {*FIRST_ORDER, OFFLOAD_RATIO}
WIDTH = 100  # columns at most
# DeepSpeed 0.19.8's TiledFusedLogitsLoss is not named: accumulation and fp16's scale do not reach its gradient of the head.
CHUNKED_LOSSES = "TRL's chunked loss or Liger's fused_linear_cross_entropy"
# An MFU above the first is shown with the best that a published run of several GPUs reached (InternLM/xtuner, A100:
# benchmarks/predict/published.py).
HIGH_MFU, BEST_MFU = 0.6, 0.78
_SEEN = 0.005  # share of a device's memory; smaller parts are not named
CARDS = 8  # rows in the table of cards, besides the requested card
UNPRICED = 12  # names of cards without a price; --json has all


def fit_surely(made: Sequence[Plan], sure: str) -> bool:
    """Check that the config of a plan fits with at least the chance of `--sure`."""
    return any(one.best[0].chance >= parse_share(sure) for one in made if one.best)


def write_config(plan: Plan, out: Path) -> None:
    """Write the DeepSpeed config of a plan's answer."""
    config = plan.best[0].candidate.ds_config(plan.job)
    write_atomically(out, json.dumps(masked_data(config), indent=2) + "\n")


def plans_json(made: Sequence[Plan], whole: bool) -> dict[str, Any]:
    """Return one or several plans as JSON data."""
    found = [one.to_json(whole) for one in made]
    return {"plans": found} if len(found) > 1 else found[0]


def show_plans(made: Sequence[Plan], out: Console, whole: bool) -> None:
    """Print one plan, or several GPUs side by side."""
    if len(made) > 1:
        comparison_table(made).show(out)
    else:
        show_plan(made[0], out, whole)


def show_plan(plan: Plan, out: Console, whole: bool = False) -> None:
    """Print one plan, at most 100 columns wide; `whole` adds each way to train."""
    _put(out, Text(plan.job.summary, style="bold"))
    _put(out, Text(batch_line(plan)))
    _put(out, Text(machine_line(plan)))
    out.print()
    _show_answer(plan, out)
    for note in plan.notes:
        _put(out, Text(f"note: {note}", style="yellow"))
    if whole:
        ways_table(plan).show(out)
    if plan.own is not None:
        _put(
            out,
            Text(f"fewest {plan.own.gpu}: ", style="bold").append(fewest_gpus(plan.own, plan.job), style="not bold"),
        )
    if cards := cards_table(plan):
        cards.show(out)
    elif plan.cards:
        _put(out, Text(NO_CARD, style="yellow"))


def links_text(hardware: Hardware) -> str:
    """Describe the rates at which GPUs exchange data, after a comma; empty for one GPU and for CPU ranks."""
    facts = hardware.gpu_facts
    if facts is None or hardware.count == 1:
        return ""
    if facts.ring_gb_per_s:
        return f", all-reduce {facts.ring_gb_per_s:.3g} GB/s (measured)"
    kind = "NVLink" if facts.link == "nvlink" else "PCIe"
    link = f", {kind} {facts.link_gb_per_s:g} GB/s (assumed)" if hardware.per_node > 1 else ""
    if hardware.nodes == 1:
        return link
    assumed = "" if facts.network_gb_per_s else " (assumed)"
    return f", {hardware.per_node} in each{link}, network {8 * hardware.network_gb_per_s:g} Gbit/s a node{assumed}"


def machine_line(plan: Plan) -> str:
    """Describe the machine and its main memory."""
    hardware = plan.hardware
    node = " a node" if hardware.nodes > 1 else ""
    main = f"main memory {_gib(hardware.host_memory_bytes)}{node}{_assumed(plan)}"
    return f"on {hardware}{links_text(hardware)}; {main}"


def batch_line(plan: Plan) -> str:
    """Format the tokens of an optimizer step; a free batch depends on the config."""
    job = plan.job
    if job.global_batch_size is None:
        return "batch free: each config has its own tokens per step"
    tokens = job.global_batch_size * job.samples_per_row * job.tokens_per_sample
    assumed = " (assumed; --global-batch-size)" if plan.batch_assumed else ""
    groups = f", {job.data_ranks} micro-batch{'es' * (job.data_ranks > 1)} at a time" if job.sequence_ranks > 1 else ""
    return f"{tokens:,.0f} tokens per step{groups}{assumed}"


def _assumed(plan: Plan) -> str:
    """Format the origin of an assumed main memory."""
    if not plan.host_assumed:
        return ""
    machine = cloud_machines().get(plan.hardware.facts or "")
    return f" (assumed, as {machine or 'in a workstation'}; --host-memory)"


def _show_answer(plan: Plan, out: Console) -> None:
    outlook = plan.outlook
    if outlook is None:
        verdict, *lines = nothing_fits_lines(plan)
        _put(out, Text(verdict, style="bold yellow"))
        _put(out, Text("\n".join(lines) + "\n"))
        return
    grid = DataTable.grid(Column(style="bold", no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for pair in _answers(plan, outlook):
        grid.add_row(*pair)
    _put(out, grid)
    out.print()


def _answers(plan: Plan, outlook: Outlook) -> Iterator[tuple[str, str]]:
    one, hardware = outlook.prediction, plan.hardware
    sentence = config_sentence(one.candidate, plan.job, hardware)
    yield "fastest" if one.sure else "likeliest", f"{sentence} ({knobs_text(one.candidate)})"
    tokens = outlook.tokens_per_second
    each = f", {rate(tokens / hardware.count)} a GPU" if hardware.count > 1 else ""
    between = _between(outlook.by_speed(tokens), rate)
    yield "speed", f"{rate(tokens)} tokens/s{between}{each}; step {one.step_seconds:.3g} s"
    if outlook.mfu is not None:
        checked = f"; published runs reach up to {BEST_MFU:.0%}" if outlook.mfu > HIGH_MFU else ""
        yield (
            "MFU",
            f"{outlook.mfu:.0%}{_between(outlook.by_speed(outlook.mfu), lambda share: f'{share:.0%}')}{checked}",
        )
    low, high = one.peak_interval
    yield (
        "memory a GPU",
        f"{one.peak_bytes / GIB:.1f} GiB ({low / GIB:.1f} to {high / GIB:.1f}) of {hardware.capacity_bytes / GIB:.1f}"
        + _chance(one),
    )
    shown = {name: size for name, size in one.memory.items() if size > _SEEN * hardware.capacity_bytes}
    yield "", ", ".join(f"{name} {size / GIB:.1f}" for name, size in shown.items())
    if hardware.reserve_bytes:
        yield "weight sync", sync_note(outlook.job, one.candidate.stage, hardware.capacity_bytes - one.peak_bytes)
    if one.host_bytes:
        yield ("main memory", f"{_gib(outlook.host_bytes)} a node for what is offloaded")
    if plan.loading_bytes:
        yield "loading", loading_line(plan)
    if plan.whole_bytes:
        yield "initialize", initialize_line(plan)
    if plan.save_bytes:
        yield "save", f"{_gib(plan.save_bytes)} more main memory on the first node, which gathers all weights"
    yield f"{format_count(plan.tokens)} tokens", _cost(outlook)
    yield "limited by", limits(one)
    if one.candidate.get(LOSS, FULL) != FULL:
        yield "loss", loss_line(plan)


def loading_line(plan: Plan) -> str:
    """Format the main memory that loading a checkpoint needs, without and with zero.Init."""
    hardware = plan.hardware
    each = f"{hardware.per_node} ranks load a full copy each" if hardware.per_node > 1 else "the weights are loaded"
    more = ", more than there is" if plan.loading_bytes > hardware.host_memory_bytes else ""
    text = f"up to {_gib(plan.loading_bytes)} of main memory a node while {each}{more}"
    return f"{text}; {_gib(plan.zero_init_bytes)} with zero.Init (ZeRO 3)" if hardware.count > 1 else text


def initialize_line(plan: Plan) -> str:
    """Format the memory that ZeRO-3 needs on each GPU until it has partitioned a model that was made whole."""
    more = ", more than it may use" if plan.whole_bytes > plan.hardware.ceiling_bytes else ""
    return f"{_gib(plan.whole_bytes)} a GPU at first{more}, unless zero.Init makes the model (as transformers' Trainer does)"


def _chance(one: Prediction) -> str:
    """Format the probability that it fits."""
    if one.sure:
        return f"; fits: {min(one.chance, 0.99):.0%}"
    return f"; fits: only {one.chance:.0%}, and no config is likelier to fit"


def nothing_fits_lines(plan: Plan) -> list[str]:
    """Return the verdict without a config that fits: the main memory that would do, or the config that comes closest."""
    hardware, with_host = plan.hardware, plan.with_host
    if with_host is not None:
        need = Shortage.of(with_host, hardware)
        has = f"{'assumed' if plan.host_assumed else 'here'} {_gib(hardware.host_memory_bytes)}; --host-memory"
        return [
            f"nothing fits without more main memory: offload needs at least {_gib(need.host_needed_bytes)} a node ({has})",
            f"then: {knobs_text(with_host.candidate)}, {token_speed(with_host, plan.job)}",
        ]
    lines = ["nothing of the space is predicted to fit"]
    if plan.closest is not None:
        need = Shortage.of(plan.closest, hardware)
        usable = f"{need.gpu_usable_bytes / GIB:.1f} may be used"
        host = f", {_gib(need.host_needed_bytes)} of main memory a node" if need.host_needed_bytes else ""
        expected = f"{plan.closest.peak_bytes / GIB:,.1f} expected, {usable}"
        need_text = f"needs {_gib_number(need.gpu_needed_bytes)} GiB a GPU to fit surely ({expected}){host}: {need}"
        lines.append(f"nearest: {knobs_text(plan.closest.candidate)}: {need_text}")
    if plan.shared is not None:
        job, one = plan.shared.job, plan.shared.prediction
        key = f"{SEQUENCE_RANKS}: {job.sequence_ranks} in --ds-config, and a script that splits them"
        lines.append(
            f"fits if {job.sequence_ranks} GPUs share each sequence ({key}): {knobs_text(one.candidate)}, {token_speed(one, job)}"
        )
    return lines


def _cost(outlook: Outlook) -> str:
    text = f"{format_hours(outlook.hours)}{_between(outlook.by_time(outlook.hours), format_hours)}"
    if outlook.usd is None or outlook.price is None:
        return f"{text}; no price known"
    return f"{text}, {format_usd(outlook.usd)}{_between(outlook.by_time(outlook.usd), format_usd)} at {outlook.price}"


def limits(one: Prediction) -> str:
    """Format the limit and the causes of step time, largest first, without those below 1 %."""
    whole = sum(one.time.values())
    parts = sorted(((seconds / whole, cause) for cause, seconds in one.time.items()), reverse=True)
    shares = ", ".join(f"{cause} {share:.0%}" for share, cause in parts if share >= 0.01)
    return f"{one.binding}: {shares}"


def loss_line(plan: Plan) -> str:
    """Describe how the fastest config's loss is computed, and what remains if a training makes all logits."""
    whole, fastest = plan.whole_loss, plan.best[0]
    then = "no config of the space fits"
    if whole is not None:
        ratio = whole.samples_per_second / fastest.samples_per_second
        then = f"{knobs_text(whole.candidate)}: {token_speed(whole, plan.job)}, {ratio:.2f}x the speed"
    return f"in chunks, in a script by {CHUNKED_LOSSES}; with all logits {then}"


@dataclass(frozen=True)
class PlanTable:
    """A table of a plan."""

    title: str
    columns: tuple[str, ...]
    numbers: frozenset[str]  # columns that are aligned to the right
    rows: tuple[tuple[tuple[str, ...], str], ...]  # (cells, `own`, `none` for what does not fit, or empty)
    note: str = ""

    def show(self, out: Console) -> None:
        """Print the table and its note."""
        styles = {"own": "bold", "none": "dim"}
        title = Text(self.title)
        table = DataTable(
            title=title,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            show_edge=False,
        )
        for name in self.columns:
            justify: JustifyMethod = "right" if name in self.numbers else "left"
            table.add_column(name, justify=justify, overflow="fold")
        for cells, kind in self.rows:
            table.add_row(*cells, style=styles.get(kind, ""))
        _put(out, table)
        if self.note:
            _put(out, Text(self.note, style="dim"))
        out.print()


def ways_table(plan: Plan) -> PlanTable:
    """Return the largest micro-batch and the fastest config of each way to train, with their tokens per second."""
    hardware, rows, stage = plan.hardware, [], None
    for way in plan.ways:
        one, need, fits = way.shown, Shortage.of(way.shown, hardware), way.largest is not None
        cells = (
            str(way.stage) if way.stage != stage else "",
            str(way),
            f"mb{one.candidate.micro_batch}: {_tokens(one, plan.job)}" if fits else "none",
            _gib_number(need.gpu_needed_bytes),
            f"{_rung(way.fastest)}: {_tokens(way.fastest, plan.job)}" if way.fastest else "",
            _gib_number(need.host_needed_bytes) if need.host_needed_bytes else "",
        )
        rows.append((cells, "" if fits else "none"))
        stage = way.stage
    note = "tokens/s of all GPUs; GiB that surely suffice for the largest micro-batch, of a GPU and of a node's main memory"
    return PlanTable(
        f"what surely fits, by stage; {_gib_number(hardware.ceiling_bytes)} GiB of a GPU may be used",
        ("ZeRO", "with", "largest", "GiB a GPU", "fastest", "GiB a node"),
        frozenset({"GiB a GPU", "GiB a node"}),
        tuple(rows),
        note,
    )


def _rung(one: Prediction) -> str:
    return f"mb{one.candidate.micro_batch} ga{one.candidate.accumulation}"


def _gib_number(size: float) -> str:
    return f"{size / GIB:,.1f}" if size < 1000 * GIB else f"{size / GIB:,.0f}"


def _tokens(one: Prediction, job: Job) -> str:
    return rate(one.samples_per_second * job.tokens_per_sample)


NO_CARD = "no card with a known price would do, in up to 8 machines of 8"


def cards_table(plan: Plan) -> PlanTable | None:
    """Return the cheapest cards with a known price, and the requested one; None if there are none."""
    usable = [card for card in plan.cards if card.best and (card.best.price or card.gpu == plan.hardware.facts)]
    if not usable:
        return None
    chosen = [card for at, card in enumerate(usable) if at < CARDS or card.gpu == plan.hardware.facts]
    dear = [card.gpu for card in plan.cards if card.best and card.best.price is None]
    others = f" and {len(dear) - UNPRICED} more" if len(dear) > UNPRICED else ""
    note = "fits from: fewest GPUs of 1, 2, 4, 8 or whole nodes of 8; GPUs: those with the lowest cost within 30 days; "
    note += "+cpu: with offload; *: compared with no published run. Rough prices on demand"
    note += f"; none known for {', '.join(dear[:UNPRICED])}{others}" if dear else ""
    columns = ("card", "fits from", "GPUs", "tokens/s", "$/h", "time", "cost")
    return PlanTable(
        f"cheapest cards for {format_count(plan.tokens)} tokens",
        columns,
        frozenset(columns[1:]),
        tuple((_card_row(card), "own" if card.gpu == plan.hardware.facts else "") for card in chosen),
        note,
    )


def _card_row(card: CardPlan) -> tuple[str, ...]:
    best = card.best
    assert best is not None
    usd = "" if best.usd is None else f"{format_usd(best.usd)}{_between(best.by_time(best.usd), format_usd)}"
    return (
        card.gpu + "*" * (not is_published(card.gpu)),
        _size(min(filter(None, (card.fewest or card.fewest_offloading, best)), key=lambda one: one.hardware.count)),
        _size(best),
        rate(best.tokens_per_second),
        f"{best.usd_per_hour:.2f}" if best.usd_per_hour is not None else "",
        format_hours(best.hours),
        usd,
    )


def fewest_gpus(card: CardPlan, job: Job) -> str:
    """Describe the fewest GPUs of a card that suffice, without and with offload, and their batch if it is not the job's."""
    parts = []
    if card.fewest:
        batch = card.fewest.job.global_batch_size
        rounded = f"; global batch {batch}" if batch != job.global_batch_size else ""
        parts.append(f"{_count(card.fewest)} ({knobs_text(card.fewest.prediction.candidate)}{rounded})")
    offloading = card.fewest_offloading
    if offloading and (card.fewest is None or offloading.hardware.count < card.fewest.hardware.count):
        need = _gib(offloading.host_bytes)
        parts.append(f"with offload {_count(offloading)} ({need} of main memory a node)")
    return "; ".join(parts) or "no number surely fits, up to 32 nodes of 8"


def _size(outlook: Outlook) -> str:
    """Format a number of GPUs; `+cpu` if the config offloads."""
    return _count(outlook) + (" +cpu" if outlook.prediction.candidate.offloaded else "")


def _count(outlook: Outlook) -> str:
    nodes = outlook.hardware.nodes
    return f"{nodes} x {outlook.hardware.per_node}" if nodes > 1 else str(outlook.hardware.count)


def comparison_table(plans: Sequence[Plan]) -> PlanTable:
    """Return several GPUs side by side, with the fastest config of each."""
    rows = []
    for plan in plans:
        outlook = plan.outlook
        machine = f"{plan.hardware.count} x {plan.hardware.name}"
        if outlook is None:
            rows.append(((machine, "nothing fits", "", "", "", "", ""), "none"))
            continue
        speed = outlook.tokens_per_second
        cells = (
            machine,
            knobs_text(outlook.prediction.candidate),
            f"{rate(speed)}{_between(outlook.by_speed(speed), rate)}",
            f"{outlook.mfu:.0%}" if outlook.mfu is not None else "",
            f"{outlook.prediction.peak_bytes / GIB:.1f}",
            format_hours(outlook.hours),
            format_usd(outlook.usd) if outlook.usd is not None else "",
        )
        rows.append((cells, ""))
    columns = ("machine", "config", "tokens/s", "MFU", "GiB a GPU", "time", "cost")
    title = f"fastest on each; time and cost are of {format_count(plans[0].tokens)} tokens"
    return PlanTable(title, columns, frozenset(columns[2:]), tuple(rows))


def knobs_text(candidate: Candidate) -> str:
    """Format the knobs that decide memory and speed, without buckets and the like."""
    return describe({name: value for name, value in candidate.knobs if name in _DECIDING})


def token_speed(one: Prediction, job: Job) -> str:
    """Format `12.3k tokens/s`, over all ranks."""
    return f"{_tokens(one, job)} tokens/s"


def _put(out: Console, what: Table | Text) -> None:
    out.print(what, highlight=False, width=min(WIDTH, out.width), overflow="fold")


def rate(number: float) -> str:
    """Format tokens per second: `870`, `12.3k`, `1.23M`."""
    for factor, suffix in ((1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * factor:
            return f"{number / factor:.3g}{suffix}"
    return f"{number:.3g}"


def _gib(size: float) -> str:
    return format_bytes(size) if size < 10 * GIB else f"{size / GIB:,.0f} GiB"


def _between(interval: Interval | None, text: Callable[[float], str]) -> str:
    return f" ({text(interval[0])} to {text(interval[1])})" if interval else ""

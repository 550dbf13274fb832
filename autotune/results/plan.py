"""Plan data, as JSON and as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.predict.predictor import Prediction
from autotune.predict.step_time import model_flops_per_token
from autotune.predict.what_if import KnownError, KnownErrors, host_bytes_per_node
from autotune.problem.candidate import Candidate, describe, job_with_candidate
from autotune.problem.gpu_specs import Price
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.knobs import FIRST_ORDER, OFFLOAD_RATIO
from autotune.results.tables import DataTable
from autotune.util.units import GIB, format_bytes, format_count, format_hours, format_usd

# -- plan --------------------------------------------------------------------------------------------------------------
#
# A plan: predictions of what fits, its speed and cost, what limits it and what would help.

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

    @property
    def tokens_interval(self) -> Interval:
        """Interval in tokens per second."""
        fast, slow = self.prediction.step_interval
        step = self.prediction.step_seconds
        return self.tokens_per_second * step / slow, self.tokens_per_second * step / fast

    @property
    def mfu(self) -> float | None:
        """Model FLOPs as a share of the devices' peak, recomputation not counted.

        None if either is unknown or only estimated.
        """
        flops = model_flops_per_token(job_with_candidate(self.job, self.prediction.candidate))
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
        """Return the bounds of the training time in hours."""
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
        """Return the bounds of the cost in USD, or None without a price."""
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
    """Largest micro-batch of one ZeRO stage that surely fits, and changes that would let the next size fit.

    The micro-batch uses the fewest memory savers.
    """

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
class PlannedGain:
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
    gains: tuple[PlannedGain, ...] = ()  # best first
    errors: KnownErrors | None = None  # for the fastest, or for the smallest that does not fit

    @property
    def outlook(self) -> Outlook | None:
        """Outlook of the fastest that fits."""
        return Outlook(self.best[0], self.job, self.hardware, self.tokens, self.price) if self.best else None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
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


# -- plan view ---------------------------------------------------------------------------------------------------------
#
# Print a plan: the answer first, then what limits it, what would help, and which machines would do.

_COLOURS = {
    "parameters": "blue",
    "gradients": "cyan",
    "optimizer": "green",
    "activations": "yellow",
    "buckets": "magenta",
    "gathered parameters": "bright_blue",
    "temporaries": "bright_magenta",
    "allocator": "bright_black",
    "context and communication": "red",
    "host": "white",
}
_SHORT = {  # in the legend
    "parameters": "weights",
    "optimizer": "states",
    "gathered parameters": "gathered",
    "temporaries": "temporary",
    "context and communication": "context",
}
_DECIDING = {*FIRST_ORDER, OFFLOAD_RATIO}
WIDTH = 100  # columns at most
BAR = 36  # characters for a device's whole memory
CARDS = 8  # rows in the table of cards, besides the requested card
UNPRICED = 12  # names of cards without a price; --json has all


def show_plan(plan: Plan, out: Console) -> None:
    """Print one plan, at most 100 columns wide."""
    _put(out, Text(plan.job.summary, style="bold"))
    _put(out, _machine(plan))
    if plan.note:
        _put(out, Text(plan.note, style="yellow"))
    out.print()
    _show_answer(plan, out)
    _show_gains(plan, out)
    _show_stages(plan, out)
    _show_best(plan, out)
    _show_host(plan, out)
    _show_cards(plan, out)


def _machine(plan: Plan) -> Text:
    hardware = plan.hardware
    per_node = f", {hardware.per_node} in each" if hardware.nodes > 1 else ""
    assumed = " (assumed; --host-memory)" if plan.host_assumed else ""
    node = " a node" if hardware.nodes > 1 else ""
    return Text(f"on {hardware}{per_node}; main memory {_gib(hardware.host_memory_bytes)}{node}{assumed}")


def _show_answer(plan: Plan, out: Console) -> None:
    outlook = plan.outlook
    if outlook is None:
        _put(out, Text("nothing of the space is predicted to fit", style="bold yellow"))
        _show_enough(plan, out)
        return
    grid = DataTable.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in _answers(plan, outlook):
        grid.add_row(name, text)
    _put(out, grid)
    out.print()


def _answers(plan: Plan, outlook: Outlook) -> Iterator[tuple[str, str]]:
    one, hardware = outlook.prediction, plan.hardware
    yield "fastest" if one.sure else "likeliest", str(one.candidate)
    low, high = outlook.tokens_interval
    tokens = outlook.tokens_per_second
    each = f", {_rate(tokens / hardware.count)} a GPU" if hardware.count > 1 else ""
    yield "speed", f"{_rate(tokens)} tokens/s ({_rate(low)} to {_rate(high)}){each}; step {one.step_seconds:.3g} s"
    if outlook.mfu is not None:
        yield "MFU", f"{outlook.mfu:.0%}{_between(outlook.mfu_interval, lambda share: f'{share:.0%}')}"
    low, high = one.peak_interval
    yield (
        "memory a GPU",
        f"{one.peak_bytes / GIB:.1f} GiB ({low / GIB:.1f} to {high / GIB:.1f}) of {hardware.capacity_bytes / GIB:.1f}"
        + _chance(one),
    )
    if one.host_bytes:
        yield (
            "main memory",
            f"{_gib(outlook.host_bytes)} a node for what is offloaded, pinned blocks as they are rounded",
        )
    yield f"{format_count(plan.tokens)} tokens", _cost(outlook)
    yield "limited by", f"{one.binding}: {_shares(one)}"
    if plan.errors:
        yield "measured", describe_errors(plan.errors)


def _chance(one: Prediction) -> str:
    """Format the probability that it fits."""
    if one.sure:
        return f"; fits: {min(one.chance, 0.99):.0%}"
    return f"; fits: only {one.chance:.0%}, and nothing is likelier: keep a smaller one at hand"


def _show_enough(plan: Plan, out: Console) -> None:
    """Print the config that comes closest to fitting, if the machine is too small."""
    stage = min(plan.stages, key=lambda one: one.smallest.peak_bytes)
    one = stage.smallest
    _put(
        out,
        Text(
            f"nearest: {one.candidate} with {one.peak_bytes / GIB:.1f} of {plan.hardware.capacity_bytes / GIB:.1f} GiB a GPU"
            + (
                f", and {_gib(plan.host[-1].bytes_per_node)} of main memory a node"
                if one.host_bytes and plan.host
                else ""
            )
        ),
    )
    if plan.errors:
        _put(out, Text(f"measured: {describe_errors(plan.errors)}"))


def _cost(outlook: Outlook) -> str:
    text = f"{format_hours(outlook.hours)}{_between(outlook.hours_interval, format_hours)}"
    if outlook.usd is None or outlook.price is None:
        return f"{text}; no price known (--price)"
    return f"{text}, {format_usd(outlook.usd)}{_between(outlook.usd_interval, format_usd)} at {outlook.price}"


def _shares(one: Prediction) -> str:
    """Format the causes of step time, largest first, without those below 1 %."""
    whole = sum(one.time.values())
    parts = sorted(((seconds / whole, cause) for cause, seconds in one.time.items()), reverse=True)
    return ", ".join(f"{cause} {share:.0%}" for share, cause in parts if share >= 0.01)


def describe_errors(errors: KnownErrors) -> str:
    """Format the predictor's measured error for this kind of job, or a note that there is none."""
    if errors.peak is None and errors.step is None:
        text = f"no measured rows for this kind of job ({errors.kind})"
        every = _named_errors(errors.all_peak, errors.all_step)
        return f"{text}; of every kind: {every}" if every else text
    return f"{errors.kind}: {_named_errors(errors.peak, errors.step)}"


def _named_errors(peak: KnownError | None, step: KnownError | None) -> str:
    named = (("memory", peak), ("step", step))
    if peak is None and step is None:
        return ""
    return ", ".join(
        f"{name} off by {error.median:.0%} ({_rows(error)})" if error else f"no measured {name} of this kind"
        for name, error in named
    )


def _rows(error: KnownError) -> str:
    if error.rows == 1:
        return "1 published row"
    return f"median of {error.rows} published rows, {error.sources} source{'s' if error.sources > 1 else ''}"


def _show_gains(plan: Plan, out: Console) -> None:
    if not plan.best:
        return
    if not plan.gains:
        if plan.own:
            _put(out, Text("nothing tried would give 2 % more speed\n", style="dim"))
        return
    table = DataTable.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    _put(out, Text("what would help most, by speed", style="bold"))
    for gain in plan.gains:
        usd = "" if gain.usd_share is None else f" (cost {gain.usd_share:+.0%})".replace("-0%", "+0%")
        faster = f"{1 + gain.share:.1f} x" if gain.share >= 1 else f"+{gain.share:.0%}"
        table.add_row(f" {faster}", gain.what + usd + (f"; {gain.detail}" if gain.detail else ""))
    _put(out, table)
    out.print()


def _show_best(plan: Plan, out: Console) -> None:
    if len(plan.best) < 2:
        return
    table = _table("fastest configs" if plan.best[0].sure else "likeliest configs")
    for name in ("config", "tokens/s", "step", "GiB a GPU", "fits", "limited by"):
        table.add_column(name, overflow="fold", justify="left" if name in ("config", "limited by") else "right")
    for one in plan.best:
        low, high = one.peak_interval
        spread = 100 * (one.step_interval[1] / one.step_seconds - 1)
        table.add_row(
            short(one.candidate),
            _rate(one.samples_per_second * plan.job.tokens_per_sample),
            f"{one.step_seconds:.3g} s ±{spread:.0f} %",
            f"{one.peak_bytes / GIB:.1f} ({low / GIB:.0f} to {high / GIB:.0f})",
            f"{min(one.chance, 0.99):.0%}",
            one.binding,
        )
    _put(out, table)
    out.print()


def _show_stages(plan: Plan, out: Console) -> None:
    hardware = plan.hardware
    _put(out, Text(f"largest micro-batch by stage; the bar is {_gib(hardware.capacity_bytes)} of a GPU", style="bold"))
    for stage in plan.stages:
        one = stage.shown
        may = stage.fitting or stage.helped
        what = f"mb {one.candidate.micro_batch}" if may else "none fits"
        line = Text(f" ZeRO {stage.stage}  {what:<10}")
        line.append(bar(one, hardware))
        speed = f", {token_speed(one, plan.job)}" if may else ""  # a config that does not run has no speed
        line.append(f"  {one.peak_bytes / GIB:.1f} GiB{speed}")
        _put(out, line)
        if may is not None and may is stage.helped:
            unsure = "" if one.sure else f" (fits: {one.chance:.0%})"
            _put(out, Text(f"         only as {short(one.candidate)}{unsure}", style="dim"))
        for unlock in stage.unlocks:
            _put(out, Text(f"         {unlock}", style="dim"))
    legend = Text(" ")
    for name, colour in _COLOURS.items():
        if any(s.shown.memory.get(name, 0) > 0.005 * hardware.capacity_bytes for s in plan.stages):
            legend.append("█", style=colour)
            legend.append(f" {_SHORT.get(name, name)} ")
    _put(out, legend)
    out.print()


def bar(one: Prediction, hardware: Hardware) -> Text:
    """Draw a prediction's memory by content, scaled to the device and with any excess marked."""
    text, drawn, total = Text(), 0, 0.0
    for name, size in one.memory.items():
        total += max(0.0, size)
        upto = min(BAR + 4, round(BAR * total / hardware.capacity_bytes))
        text.append("█" * max(0, upto - drawn), style=_COLOURS.get(name, "white"))
        drawn = max(drawn, upto)
    if drawn < BAR:
        text.append("·" * (BAR - drawn), style="dim")
    return text


def _show_host(plan: Plan, out: Console) -> None:
    if not plan.host:
        return
    _put(out, Text("main memory a node for offload, pinned blocks as they are rounded", style="bold"))
    limit = plan.hardware.host_memory_bytes
    for need in plan.host:
        enough = "fits" if need.fits_device and need.bytes_per_node <= limit else _lacks(need)
        what = "optimizer and parameters" if need.parameters else "optimizer"
        style = "" if enough == "fits" else "dim"
        _put(out, Text(f" ZeRO {need.stage}  {what:<25} {_gib(need.bytes_per_node):>9}  {enough}", style=style))
    out.print()


def _lacks(need: HostNeed) -> str:
    return "more than there is" if need.fits_device else "and a GPU is still too small for one sequence"


def _show_cards(plan: Plan, out: Console) -> None:
    if plan.own is not None:
        _put(out, Text(f"fewest {plan.own.gpu}: ", style="bold").append(_fewest(plan.own), style="not bold"))
    usable = [card for card in plan.cards if card.best]
    if not usable:
        if plan.cards:
            _put(out, Text("no card that is known would do, in up to 8 machines of 8", style="yellow"))
        return
    chosen = [card for at, card in enumerate(usable) if at < CARDS or card.gpu == plan.hardware.facts]
    table = _table(f"cheapest cards for {format_count(plan.tokens)} tokens")
    for name, justify in (("card", "left"), ("fits from", "right"), ("GPUs", "right"), ("tokens/s", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for name in ("$ an hour", "time", "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    for card in chosen:
        own = card.gpu == plan.hardware.facts
        table.add_row(*_card_row(card), style="bold" if own else "")
    _put(out, table)
    out.print()
    dear = [card.gpu for card in plan.cards if card.best and card.best.price is None]
    others = f" and {len(dear) - UNPRICED} more" if len(dear) > UNPRICED else ""
    note = "GPUs: the cheapest of 1, 2, 4, 8 or whole nodes of 8 within 30 days; +cpu: with offload. "
    note += "Prices are rough, on demand"
    note += f"; none known for {', '.join(dear[:UNPRICED])}{others}" if dear else ""
    _put(out, Text(note, style="dim"))


def _card_row(card: CardPlan) -> list[str]:
    best = card.best
    assert best is not None
    usd = "" if best.usd is None else f"{format_usd(best.usd)}{_between(best.usd_interval, format_usd)}"
    return [
        card.gpu,
        _count(card.fewest) or f"{_count(card.fewest_offloading)} +cpu",
        _count(best),
        _rate(best.tokens_per_second),
        f"{best.usd_per_hour:.2f}" if best.usd_per_hour is not None else "",
        format_hours(best.hours),
        usd,
    ]


def _fewest(card: CardPlan) -> str:
    parts = []
    if card.fewest:
        parts.append(f"{_count(card.fewest)} ({short(card.fewest.prediction.candidate)})")
    offloading = card.fewest_offloading
    if offloading and (card.fewest is None or offloading.hardware.count < card.fewest.hardware.count):
        need = _gib(offloading.host_bytes)
        parts.append(f"with offload {_count(offloading)} ({need} of main memory a node)")
    return "; ".join(parts) or "more than 32 nodes of 8"


def _count(outlook: Outlook | None) -> str:
    if outlook is None:
        return ""
    nodes = outlook.hardware.nodes
    return f"{nodes} x {outlook.hardware.per_node}" if nodes > 1 else str(outlook.hardware.count)


def show_comparison(plans: list[Plan], out: Console) -> None:
    """Print several GPUs side by side, with the fastest config of each."""
    table = _table(f"fastest on each; time and cost are of {format_count(plans[0].tokens)} tokens")
    table.add_column("machine", no_wrap=True)
    table.add_column("config", overflow="fold")
    for name in ("tokens/s", "MFU", "GiB a GPU", "time", "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    for plan in plans:
        outlook = plan.outlook
        machine = f"{plan.hardware.count} x {plan.hardware.name}"
        if outlook is None:
            table.add_row(machine, "nothing fits", "", "", "", "", "")
            continue
        low, high = outlook.tokens_interval
        table.add_row(
            machine,
            short(outlook.prediction.candidate),
            f"{_rate(outlook.tokens_per_second)} ({_rate(low)} to {_rate(high)})",
            f"{outlook.mfu:.0%}" if outlook.mfu is not None else "",
            f"{outlook.prediction.peak_bytes / GIB:.1f}",
            format_hours(outlook.hours),
            format_usd(outlook.usd) if outlook.usd is not None else "",
        )
    _put(out, table)
    out.print()


def short(candidate: Candidate) -> str:
    """Format the knobs that decide memory and speed, without buckets and the like."""
    return describe({name: value for name, value in candidate.knobs if name in _DECIDING})


def token_speed(one: Prediction, job: Job) -> str:
    """Format `12.3k tokens/s`, over all ranks."""
    return f"{_rate(one.samples_per_second * job.tokens_per_sample)} tokens/s"


def _table(title: str) -> DataTable:
    return DataTable(
        title=Text(title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )


def _put(out: Console, what: Table | Text) -> None:
    out.print(what, highlight=False, width=min(WIDTH, out.width), overflow="fold")


def _rate(number: float) -> str:
    """Format tokens per second: `870`, `12.3k`, `1.23M`."""
    for factor, suffix in ((1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * factor:
            return f"{number / factor:.3g}{suffix}"
    return f"{number:.3g}"


def _gib(size: float) -> str:
    return format_bytes(size) if size < 10 * GIB else f"{size / GIB:,.0f} GiB"


def _between(interval: Interval | None, text: Callable[[float], str]) -> str:
    return f" ({text(interval[0])} to {text(interval[1])})" if interval else ""

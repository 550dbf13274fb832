"""A table of published measurements: its rows as text, and what the words in its cells mean.

Nothing here knows a source, a model or the predictor.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import UserError
from autotune.units import GIB

COLUMNS = [
    "id",
    "source_repo_or_url",
    "source_path_or_section",
    "model",
    "params_b",
    "gpu",
    "gpu_mem_gib",
    "n_gpus",
    "seq_len",
    "micro_batch",
    "grad_accum",
    "precision",
    "optimizer",
    "parallel",
    "offload_optimizer",
    "offload_param",
    "checkpointing",
    "lora",
    "attention",
    "figure_kind",
    "value",
    "unit",
    "notes",
]
# Without these a row says nothing that could be predicted.
NEEDED = ("model", "gpu", "n_gpus", "seq_len", "micro_batch", "figure_kind", "value", "unit")

MIB = 2**20
# What a printed unit is in bytes. A `GB` is 2^30 unless a row says that its code divides by 1e9: torch's users, nvidia-smi's
# readers and DeepSpeed's logs all divide by 1024^3 and write GB.
MEMORY_UNITS = {"gib": GIB, "gb": GIB, "mib": MIB, "mb": MIB, "bytes": 1, "b": 1, "g": GIB}
RATE_UNITS = {"samples/s": "samples", "tokens/s": "tokens", "sequences/s": "samples", "it/s": "steps"}
TIME_UNITS = {"s": 1.0, "ms": 1e-3, "s/it": 1.0, "s/step": 1.0, "min": 60.0}


class LeftOut(Exception):
    """A row that is not judged; the message is the reason, the same for all rows of a kind."""


class Unreadable(Exception):
    """A cell that nobody could read: the column, and why."""

    def __init__(self, column: str, why: str) -> None:
        super().__init__(f"column {column}: {why}")


@dataclass(frozen=True)
class Row:
    """One figure as its source printed it."""

    number: int  # line in the table, the header being 1
    cells: dict[str, str]

    def __getitem__(self, column: str) -> str:
        return self.cells.get(column, "").strip()

    @property
    def source(self) -> str:
        """Short and the same for all rows of a source: `QwenLM/Qwen`, `DeepSpeed/issues/4527`."""
        text = re.sub(r"^(github:|https?://(www\.)?)", "", self["source_repo_or_url"] or "unnamed")
        text = re.sub(r"^(gist\.)?github\.com/", "", text)
        return " ".join(text.split())

    @property
    def id(self) -> str:
        return self["id"] or f"line {self.number}"

    def unknown(self, column: str) -> bool:
        """Whether the source does not say: empty, `unknown`, or a dash."""
        return bare(self[column]) in ("", "unknown", "-", "n/a", "?", "none stated")

    def says(self, *words: str, column: str = "notes") -> bool:
        """Whether a cell has one of these words, in any case."""
        return any(word in self[column].lower() for word in words)


def read_table(path: Path) -> list[Row]:
    """The table's rows.

    Raises:
        UserError: no such file, or it lacks columns without which nothing can be predicted.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            named = reader.fieldnames or []
            rows = [Row(reader.line_num, {k: v or "" for k, v in cells.items() if k}) for cells in reader]
    except FileNotFoundError:
        raise UserError(f"--csv {path}: no such file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"--csv {path}: {error}; expected a table of {', '.join(NEEDED)}, …") from None
    if missing := [name for name in NEEDED if name not in named]:
        raise UserError(f"--csv {path} has no column {', '.join(missing)}; expected {', '.join(COLUMNS)}")
    if not rows:
        raise UserError(f"--csv {path} has no rows")
    return rows


# -- cells -----------------------------------------------------------------------------------------------------------


def bare(text: str) -> str:
    """A cell without what stands in brackets, in lower case."""
    return " ".join(re.sub(r"\([^)]*\)", " ", text).lower().split())


def whole(row: Row, column: str) -> int | None:
    """The first whole number of a cell; None where it is unknown.

    Raises:
        Unreadable: there is none, or one below 1.
    """
    if row.unknown(column):
        return None
    text = bare(row[column]) or row[column].lower()
    found = re.search(r"\d[\d,]*", text)
    if found is None:
        raise Unreadable(column, f"{row[column]!r} has no number")
    number = int(found.group().replace(",", ""))
    if product := re.match(r"(\d+)(?: nodes?)? ?[x*] ?(\d+)", text):  # 2 nodes x 8
        number = int(product.group(1)) * int(product.group(2))
    if number < 1:
        raise Unreadable(column, f"{row[column]!r} is below 1")
    return number


@dataclass(frozen=True)
class Length:
    """Tokens of a row of a batch: the longest, and whether all are that long."""

    longest: int
    full: bool


def length(row: Row) -> Length | None:
    """The length that a cell states: `2048`, `<=512 (…)`, `variable (max 768, …)`, `512 in + 512 out`."""
    if row.unknown("seq_len"):
        return None
    text = row["seq_len"].lower()
    numbers = [int(n) * (1024 if thousands else 1) for n, thousands in re.findall(r"(\d+)(k\b)?", bare(text))]
    varies = any(word in text for word in ("<", "variable", "max ", "up to", "unpacked", "at most", "~"))
    inside = re.search(r"max\D{0,12}(\d+)", text)
    if not numbers and inside:
        numbers = [int(inside.group(1))]
    if not numbers:
        if varies or "unknown" in text:
            return None
        raise Unreadable("seq_len", f"{row['seq_len']!r} has no number")
    longest = sum(numbers) if "+" in bare(text) else max(numbers)
    if "presumed" in text and not varies:
        return Length(longest, True)
    if longest < 1:
        raise Unreadable("seq_len", f"{row['seq_len']!r} is below 1")
    return Length(longest, not varies)


def numbers_of(text: str) -> Iterator[float]:
    """The numbers of a value like `43.5`, `12.6+10.9`, `72-80`, `1,650`, `~51`."""
    for found in re.findall(r"\d[\d,]*\.?\d*(?:e[+-]?\d+)?", text.lower().replace("−", "-")):
        yield float(found.replace(",", ""))


def value_of(row: Row) -> float:
    """The figure's number. Of GPU0 + GPU1 the larger: a peak is the worst rank's. Of a range the middle.

    Raises:
        Unreadable: there is no number.
    """
    found = list(numbers_of(row["value"]))
    if not found or found[0] <= 0 or row["value"].startswith("-"):
        raise Unreadable("value", f"{row['value']!r} is no positive number")
    if "+" in row["value"]:
        return max(found)
    return sum(found[:2]) / 2 if "-" in row["value"].strip("-") and len(found) > 1 else found[0]


# What a `GB` can be, from the largest down; the first in which the figure fits the card counts.
GIGABYTES = (GIB, 1000 * MIB, 1e9)


def memory_bytes(row: Row, gpus: int, card_bytes: float = float("inf"), gigabyte: float = GIB) -> float:
    """The figure in bytes of one GPU.

    Args:
        card_bytes: all memory of one GPU; a figure in GB that is more is in smaller GB.
        gigabyte: bytes of the source's GB, where that is known.

    Raises:
        Unreadable: the unit is none of memory.
    """
    word = re.match(r"[a-z]+", row["unit"].lower().replace("_", " "))
    if word is None or word.group() not in MEMORY_UNITS:
        raise Unreadable("unit", f"{row['unit']!r} is none of memory ({', '.join(MEMORY_UNITS)})")
    total = any(text in row["unit"].lower() for text in ("sum", "total"))
    value = value_of(row) / (gpus if total else 1)
    if word.group() not in ("gb", "g"):
        return value * MEMORY_UNITS[word.group()]
    if row.says("/1e9", "decimal gb", "/ 1e9"):
        gigabyte = 1e9
    sizes = [size for size in GIGABYTES if size <= gigabyte]
    return next((value * size for size in sizes if value * size <= card_bytes), value * sizes[-1])


def step_seconds(row: Row, *, samples: float, tokens: float, gpus: int, rate_is: str | None) -> float:
    """Seconds of an optimizer step that takes `samples` and `tokens` over all GPUs.

    Args:
        rate_is: "total" or "per_gpu" where the figure's kind leaves it open.

    Raises:
        LeftOut: whether a rate is one GPU's or all GPUs' is not known.
        Unreadable: the unit is none of time or speed.
    """
    kind, unit = row["figure_kind"], re.sub(r"\s*\(.*", "", row["unit"].lower()).strip()
    if unit in TIME_UNITS:
        return value_of(row) * TIME_UNITS[unit]
    word = next((name for name in RATE_UNITS if unit.startswith(name)), None)
    if word is None:
        raise Unreadable("unit", f"{row['unit']!r} is none of time or speed ({', '.join([*TIME_UNITS, *RATE_UNITS])})")
    per_gpu = rate_is == "per_gpu"
    if rate_is is None:
        per_gpu = unit.endswith("/gpu") or kind.endswith("per_gpu")
        if "total_or_per_gpu" in kind:
            if gpus > 1:
                raise LeftOut("whether the speed is one GPU's or all GPUs' is not stated")
            per_gpu = False
    amount = {"samples": samples, "tokens": tokens, "steps": 1.0}[RATE_UNITS[word]]
    return amount / (value_of(row) * (gpus if per_gpu else 1))


# Kinds of figures -> what they are of. The first word that a kind starts with counts.
KINDS = {
    "peak_alloc": "allocated",
    "peak_active": "allocated",
    "peak_reserved": "reserved",
    "nvidia_smi": "nvml",
    "peak_unspecified": "nvml",
    "nvml": "nvml",
    "peak": "nvml",
    "max_micro_batch": "decision",
    "fits": "decision",
    "oom": "decision",
    "step_s": "step",
    "samples_per_s": "step",
    "tokens_per_s": "step",
}
NOT_PREDICTED = {
    "alloc_after_step": "memory held between steps, no peak",
    "reserved_after_epoch": "memory held between steps, no peak",
    "mem_first_number": "memory before the training, no peak",
    "reserved_p99": "a percentile of steps, no peak",
    "host_oom": "host memory",
    "host": "host memory",
}


def quantity_of(row: Row) -> str:
    """What the figure is of: allocated, reserved, nvml, step or decision.

    Raises:
        LeftOut: it is of nothing that is predicted.
        Unreadable: nobody knows the kind.
    """
    kind = bare(row["figure_kind"])
    for name, why in NOT_PREDICTED.items():
        if kind.startswith(name):
            raise LeftOut(why)
    for name, quantity in KINDS.items():
        if kind.startswith(name):
            return quantity
    raise Unreadable("figure_kind", f"{row['figure_kind']!r}; known: {', '.join([*KINDS, *NOT_PREDICTED])}")

"""A table of published measurements: its rows as text, and what the words in its cells mean.

Nothing here knows a source, a model or the predictor.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import UserError
from autotune.util.units import GIB
from benchmarks.predict.published.number_formats import Length, Printed, count, length_of, printed
from benchmarks.predict.published.words import (
    LeftOut,
    UnknownWord,
    Unreadable,
    bare,
    remarks_of,
    silent,
    states,
    vocabulary,
)

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
MEMORY_UNITS = {"gib": GIB, "gb": GIB, "mib": MIB, "mb": MIB, "bytes": 1, "b": 1, "g": GIB, "m": MIB, "kib": 2**10}
RATE_UNITS = {"samples": "samples", "tokens": "tokens", "sequences": "samples", "it": "steps", "steps": "steps"}
TIME_UNITS = {"s": 1.0, "ms": 1e-3, "min": 60.0}
_SAME_UNITS = (  # other spellings of parts of a unit, in this order
    (r"\s*(?:\bper\b|/)\s*", "/"),
    (r"seconds?\b|\bsecs?\b", "s"),
    (r"milliseconds?\b|msecs?\b", "ms"),
    (r"minutes?\b|mins\b", "min"),
    (r"iterations?\b|iters?\b", "it"),
    (r"\bsteps?\b(?=/)", "steps"),
    (r"\b(?:toks?|token)\b", "tokens"),
    (r"\b(?:samps?|sample|examples?|seqs?|sequence)\b", "samples"),
    (r"^(?:tps|tok/s)\b", "tokens/s"),
    (r"^tgs\b", "tokens/s/gpu"),
    (r"gpu/s$", "s/gpu"),
    (r"/(?:device|card|accelerator|rank)\b", "/gpu"),
    (r"gibibytes?|gbytes?|gigabytes?", "gb"),
    (r"megabytes?|mbytes?", "mb"),
    (r"\bbyte\b", "bytes"),
)


@dataclass(frozen=True)
class Row:
    """One figure as its source printed it."""

    number: int  # line in the table, the header being 1
    cells: dict[str, str]
    table: str = ""  # the file's name

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

    @property
    def kind(self) -> str:
        """The kind of figure as words.json spells it: `max_micro_batch`."""
        return re.sub(r"[\s\-/]+", "_", bare(self["figure_kind"]))

    @property
    def of_speed(self) -> bool:
        """Whether the figure is one of speed, whatever it says."""
        return self.kind.startswith(tuple(vocabulary()["figure_kind"]["kinds"]["step"]))

    def unknown(self, column: str) -> bool:
        """Whether the source does not say: empty, `unknown`, or a dash."""
        return silent(self[column])

    def says(self, *words: str, column: str = "notes") -> bool:
        """Whether a cell has one of these words, in any case, and does not deny it (`no liger`, `torch.compile off`)."""
        return any(states(self[column].lower(), word) for word in words)


def read_table(path: Path) -> list[Row]:
    """The table's rows.

    Raises:
        UserError: no such file, or it lacks columns without which nothing can be predicted.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            named = reader.fieldnames or []
            rows = [Row(reader.line_num, {k: v or "" for k, v in cells.items() if k}, path.name) for cells in reader]
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


def whole(row: Row, column: str) -> int | None:
    """The whole number of a cell; None where it is unknown.

    Raises:
        LeftOut: it has several.
        Unreadable: there is none, or one below 1.
    """
    return None if row.unknown(column) else count(row[column], column)


def length(row: Row) -> Length | None:
    """The length that a cell states: `2048`, `<=512 (…)`, `variable (max 768, …)`, `512 in + 512 out`."""
    return None if row.unknown("seq_len") else length_of(row["seq_len"])


def value_of(row: Row) -> float:
    """The figure's number. Of GPU0 + GPU1 the larger: a peak is the worst rank's. Of a range the middle.

    Raises:
        LeftOut: it is a bound, or one of several figures.
        Unreadable: there is no number.
    """
    return _figure(row).value


def _figure(row: Row) -> Printed:
    if row.unknown("value"):
        raise LeftOut("no figure stated")
    return printed(row["value"])


def unit_of(row: Row) -> str:
    """The figure's unit, as it is spelt here: of the unit's cell, or where that is empty of what stands behind the number.

    Raises:
        Unreadable: the two say something else.
    """
    beside, column = _figure(row).unit, row["unit"] or remarks_of(row["figure_kind"])
    if not column or not beside:
        return plain_unit(column or beside)
    if _kind_of_unit(plain_unit(beside)) not in (None, _kind_of_unit(plain_unit(column))):
        raise Unreadable("value", f"{row['value']!r} is in another unit than {column!r}")
    return plain_unit(column)


def plain_unit(text: str) -> str:
    """A unit as RATE_UNITS, TIME_UNITS and MEMORY_UNITS spell it, without brackets."""
    text = re.sub(r"\s*\(.*", "", text.lower().replace("_", " ")).strip()
    for pattern, same in _SAME_UNITS:
        text = re.sub(pattern, same, text)
    return text


def _kind_of_unit(unit: str) -> str | None:
    """The part of a unit that tells it from others."""
    found = re.match(r"[a-z]+(?:/[a-z]+)?", unit)
    word = found.group() if found else ""
    return word.split("/")[0] if word.split("/")[0] in MEMORY_UNITS else word or None


# What a `GB` can be, from the largest down; the first in which the figure fits the card counts.
GIGABYTES = (GIB, 1000 * MIB, 1e9)


def memory_bytes(row: Row, gpus: int, card_bytes: float = float("inf"), gigabyte: float = GIB) -> float:
    """The figure in bytes of one GPU.

    Args:
        card_bytes: all memory of one GPU; a figure in GB that is more is in smaller GB.
        gigabyte: bytes of the source's GB, where that is known.

    Raises:
        LeftOut: it is a bound, or one of several figures.
        Unreadable: the unit is none of memory.
    """
    unit = unit_of(row)
    word = re.match(r"[a-z]+", unit)
    if word is None or word.group() not in MEMORY_UNITS:
        raise Unreadable("unit", f"{row['unit']!r} is none of memory ({', '.join(MEMORY_UNITS)})")
    total = any(text in unit for text in ("sum", "total", "all gpus"))
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
    kind, unit = row.kind, unit_of(row)
    if (time := re.fullmatch(r"(s|ms|min)(?:/(?:it|step|steps|batch))?", unit)) is not None:
        return value_of(row) * TIME_UNITS[time.group(1)]
    rate = re.match(r"(samples|tokens|sequences|it|steps)/s\b", unit)
    if rate is None:
        known = [*TIME_UNITS, *(f"{name}/s" for name in RATE_UNITS)]
        raise Unreadable("unit", f"{row['unit']!r} is none of time or speed ({', '.join(known)})")
    what = RATE_UNITS[rate.group(1)]
    per_gpu = rate_is == "per_gpu"
    if rate_is is None and what != "steps":
        per_gpu = unit.endswith("/gpu") or kind.endswith(("per_gpu", "_gpu")) or kind.startswith("tgs")
        if "total_or_per_gpu" in kind:
            if gpus > 1:
                raise LeftOut("whether the speed is one GPU's or all GPUs' is not stated")
            per_gpu = False
    amount = {"samples": samples, "tokens": tokens, "steps": 1.0}[what]
    return amount / (value_of(row) * (gpus if per_gpu else 1))


def quantity_of(row: Row) -> str:
    """What the figure is of: allocated, reserved, nvml, step or decision. The longest name that a kind begins with counts.

    Raises:
        LeftOut: it is of nothing that is predicted.
        Unreadable: nobody knows the kind.
    """
    kind = row.kind
    words = vocabulary()["figure_kind"]
    names: dict[str, tuple[str, str]]
    names = {name: (quantity, "") for quantity, known in words["kinds"].items() for name in known}
    names |= {name: ("", why) for why, known in words["not_predicted"].items() for name in known}
    best = max((name for name in names if kind.startswith(name)), key=len, default=None)
    if best is None:
        raise Unreadable("figure_kind", f"{row['figure_kind']!r} is none of the kinds in words.json")
    quantity, why = names[best]
    if why:
        raise LeftOut(why)
    return quantity


__all__ = ["COLUMNS", "LeftOut", "Length", "Row", "UnknownWord", "Unreadable", "bare", "length", "memory_bytes"]
__all__ += ["quantity_of", "read_table", "step_seconds", "unit_of", "value_of", "whole"]

"""`python -m autotune.gallery.page`: write the page of winners and the schema, `docs/gallery.md` and `gallery/schema.json`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autotune.gallery.schema import Entry, Tried, schema
from autotune.gallery.warm_start import DECIDING, shipped_entries
from autotune.problem.candidate import ATTENTION, COMPILED, LORA, PACKING, RUNG_KNOBS, describe
from autotune.util.files import write_atomically

ROOT = Path(__file__).parents[2]  # root of the repository
PAGE, SCHEMA = Path("docs/gallery.md"), Path("gallery/schema.json")
SHOWN = (*DECIDING, *RUNG_KNOBS, ATTENTION, COMPILED, LORA, PACKING)  # the entry's file has the other knobs
BEGIN, END = "<!-- gallery: written by `make gallery` -->", "<!-- gallery ends -->"


def rows() -> list[dict[str, Any]]:
    """Return the winner of each entry, sorted by model and card."""
    found = [_row(name, entry) for name, entry in shipped_entries().items() if entry.best is not None]
    return sorted(found, key=lambda row: (row["model"], row["machine"], row["seq_len"], row["entry"]))


def _row(name: str, entry: Entry) -> dict[str, Any]:
    best, machine, job = entry.best, entry.machine, entry.job
    assert best is not None
    return {
        "entry": name,
        "model": job.model or f"{job.architecture or 'a model'} of {(job.parameters or 0) / 1e9:.3g}B",
        "machine": f"{machine.count} x {machine.gpu or machine.name}",
        "seq_len": job.seq_len,
        "trained": f"LoRA {job.lora.split(',')[0]}" if job.lora else "all weights",
        "config": describe({name: value for name, value in best.candidate.knobs if name in SHOWN}),
        "tokens_per_second": round(best.tokens_per_second or 0.0),
        "peak": _peak(best),
        "of": sum(one.outcome == "ok" for one in entry.candidates),
        "candidates": len(entry.candidates),
        "verified": entry.verified,
        "origin": entry.origin.source or entry.origin.kind,
    }


def _peak(best: Tried) -> str:
    if best.peak_gib is None:
        return "not told"
    what = {"process": "", "torch_allocated": " allocated", "torch_reserved": " reserved"}[best.peak_of]
    return f"{best.peak_gib:.3g} GiB{what}"


def table(found: Iterable[dict[str, Any]]) -> str:
    """Format the winners as a Markdown table."""
    lines = [
        "| model | on | tokens | trains | fastest config | tokens/s | peak | of | from |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        origin = row["origin"]
        source = f"[{origin}](https://{origin})" if "/" in origin else origin
        source += ", verified" if row["verified"] else ""
        cells = (
            *(row["model"], row["machine"], row["seq_len"], row["trained"], f"`{row['config']}`"),
            *(f"{row['tokens_per_second']:,}", row["peak"], f"{row['of']} of {row['candidates']}", source),
        )
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def page(before: str) -> str:
    """Replace the table in the page, and keep the text around it."""
    head, _, rest = before.partition(BEGIN)
    return f"{head}{BEGIN}\n{table(rows())}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Write the gallery page and the JSON schema."""
    write_atomically(ROOT / PAGE, page((ROOT / PAGE).read_text(encoding="utf-8")))
    write_atomically(ROOT / SCHEMA, schema())


if __name__ == "__main__":
    main()

"""Predictions against measurements that others published: memory, steps, and what fits, without a GPU.

    python benchmarks/predict/published/published.py [--csv FILE] [--source TEXT] [--kind peak|step|decision] \
        [--rows] [--json FILE]

Every usable row of trust A and B becomes a Job, Hardware and Candidate (`readers.py`, and a reader a source in
`sources.py`), first without calibration and then after the first row of each source has calibrated the predictor.
Steps of our own trials on GPUs (`trials.py`) are rows, too. `--csv` takes another table in the same columns. Models are
traced once and cached; the first run takes about 15 minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[3])

from autotune.errors import UserError
from autotune.predict.what_if import JobKind
from benchmarks.common import command_line, parse, print_table, write_json
from benchmarks.predict.published.error import transfer
from benchmarks.predict.published.readers import Case
from benchmarks.predict.published.rows import Row, read_table
from benchmarks.predict.published.scores import (
    MEMORY,
    Scored,
    calibrated,
    fault,
    parameters_of,
    predictable,
    ranked,
    spearman,
    summary,
    traced,
    uncalibrated,
)
from benchmarks.predict.published.sources import read, source_of
from benchmarks.predict.published.trials import OWN, own_trials
from benchmarks.predict.published.words import DATA, LeftOut, Unreadable

TABLES = sorted(DATA.glob("*.csv"))
# Issue: on rows of trust A and B. Shares of the measured value.
TARGETS = {
    "peak": {"median": (0.07, 0.04), "half_width": (0.12, 0.05)},
    "step": {"median": (0.18, 0.08), "half_width": (0.45, 0.15)},
}
INSIDE = (0.90, 0.98)
RIGHT = 0.95
SPEARMAN = 0.95
SMALL_ROWS = 12
SMALL_SOURCE = "ml-sys"  # the smallest models: traced in seconds


def kind_of(case: Case) -> str:
    return "peak" if case.quantity in MEMORY else case.quantity


def cases_in(rows: Sequence[Row]) -> tuple[list[Case], Counter[tuple[str, str]], list[str]]:
    """(cases, how many rows of each source are left out for each reason, a line for each row that nobody could read)."""
    cases: list[Case] = []
    left: Counter[tuple[str, str]] = Counter()
    unreadable = []
    for row in rows:
        try:
            cases += read(row)
        except LeftOut as why:
            left[source_of(row).name, str(why)] += 1
        except Unreadable as error:
            unreadable.append(f"{row.table}: row {row.id} (line {row.number}): {error}")
        except UserError as error:
            left[source_of(row).name, str(error)] += 1
        except Exception as error:  # a fault of a reader is one row's, and no reason to judge no other
            left[source_of(row).name, fault(error)] += 1
    return cases, left, unreadable


# -- what is printed -------------------------------------------------------------------------------------------------


def percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f}"


def shown(name: str, kind: str, scored: Sequence[Scored], rank: bool) -> dict[str, Any]:
    """A line of the table."""
    s = summary(scored)
    decided = f"{s['right']}/{s['right'] + s['wrong']}" if "right" in s else None
    return {
        "source": name.split("/")[-1],
        "kind": kind,
        "rows": s["rows"],
        "mid %": percent(s.get("median")),
        "p90 %": percent(s.get("p90")),
        "bias %": percent(s.get("bias")),
        "in %": percent(s.get("inside")),
        "± %": percent(s.get("half_width")),
        "right": decided,
        "rho": correlation_of(scored) if rank else None,
    }


def correlation_of(scored: Sequence[Scored]) -> str | None:
    """Spearman's, `equal` where figures that are all the same have none, None for too few rows."""
    if not ranked(scored):
        return None
    found = spearman(scored)
    return EQUAL if found is None else f"{found:.3f}"


EQUAL = "equal"
KINDS = ("peak", "step", "decision")


def lines(scored: Sequence[Scored]) -> list[dict[str, Any]]:
    """A line for each source and kind, then held-out sources, fitted ones, and all."""
    sources = list(dict.fromkeys(source_of(one.case.row) for one in scored))
    groups: list[tuple[str, list[Scored], bool]] = [
        (source.name + (" *" if source.held_out else ""), [o for o in scored if source_of(o.case.row) == source], True)
        for source in sources
    ]
    if len(sources) > 1:
        held = [one for one in scored if source_of(one.case.row).held_out]
        fitted = [one for one in scored if not source_of(one.case.row).held_out]
        groups += [("held-out sources", held, False), ("fitted sources", fitted, False), ("all", list(scored), False)]
    found = []
    for name, rows, rank in groups:
        for kind in KINDS:
            own = [one for one in rows if kind_of(one.case) == kind]
            if own:
                found.append(shown(name, kind, own, rank))
    return found


def verdicts(before: Sequence[Scored], after: Sequence[Scored]) -> list[dict[str, Any]]:
    """The targets beside what is reached, over all rows."""
    found = []
    for kind, targets in TARGETS.items():
        for at, (what, scored) in enumerate((("uncalibrated", before), ("after one row", after))):
            own = [one for one in scored if kind_of(one.case) == kind]
            if not own:
                continue
            s = summary(own)
            for measure, limits in targets.items():
                found.append(judged(f"{kind}, {what}: {measure.replace('_', ' ')}", s[measure], f"<= {limits[at]:.0%}"))
                found[-1]["met"] = "yes" if s[measure] <= limits[at] else "no"
            found.append(judged(f"{kind}, {what}: inside 95 %", s["inside"], "90 to 98 %"))
            found[-1]["met"] = "yes" if INSIDE[0] <= s["inside"] <= INSIDE[1] else "no"
    decisions = [one for one in before if kind_of(one.case) == "decision"]
    if decisions:
        share = sum(one.right for one in decisions) / len(decisions)
        found.append({**judged("fits or not: right", share, ">= 95 %"), "met": "yes" if share >= RIGHT else "no"})
    ranks = [float(line["rho"]) for line in lines(before) if line["rho"] not in (None, EQUAL)]
    if ranks:
        good = sum(rank >= SPEARMAN for rank in ranks)
        found.append(
            {
                "measure": "Spearman >= 0.95: sources and kinds of 8 rows or more",
                "ours": f"{good} of {len(ranks)}",
                "target": "all",
                "met": "yes" if good == len(ranks) else "no",
            }
        )
    return found


def judged(measure: str, ours: float, target: str) -> dict[str, Any]:
    return {"measure": measure, "ours": f"{ours:.1%}", "target": target}


def row_lines(scored: Sequence[Scored], after: Sequence[Scored]) -> list[dict[str, Any]]:
    """A line for each row, for a look at single ones."""
    later = {id(one.case): one for one in after}
    found = []
    for one in scored:
        case, second = one.case, later.get(id(one.case))
        unit = 1.0 if case.quantity in ("step", "decision") else 2**30
        text = {name: f"{getattr(one, name) / unit:.4g}" for name in ("predicted", "low", "high")}
        found.append(
            {
                "id": case.row.id,
                "what": f"{case.job.model.name} L{case.job.seq_len} x{case.job.ranks} {case.candidate}"[:58],
                "kind": case.quantity,
                "measured": f"{case.value / unit:.4g}",
                **text,
                "error %": percent(one.predicted / case.value - 1) if case.value else None,
                "after %": percent(second.predicted / case.value - 1) if second and case.value else None,
            }
        )
    return found


def as_json(one: Scored, after: Scored | None) -> dict[str, Any]:
    """One row's figure in bytes or seconds, uncalibrated and after the source's first row (None where it is that row)."""
    case = one.case
    job, candidate, hardware = case.job, case.candidate, case.hardware
    samples = candidate.micro_batch * candidate.accumulation * job.data_ranks * job.samples_per_row
    return {
        "id": case.row.id,
        "source": source_of(case.row).name,
        "figure": kind_of(case),
        "quantity": case.quantity,
        "kind": vars(JobKind.of(job, candidate, hardware)),
        "model": job.model.name,
        "parameters": parameters_of(case),
        "gpu": hardware.facts or hardware.name,
        "gpus": hardware.count,
        "nodes": hardware.nodes,
        "seq_len": job.seq_len,
        "sequence_ranks": job.sequence_ranks,
        "micro_batch": candidate.micro_batch,
        "checkpointing": candidate.checkpointing,
        "trains": f"LoRA {job.lora}" if job.lora else job.optimizer_kind,
        "by": "torch" if job.torch_alone else "DeepSpeed",
        "step_tokens": samples * job.tokens_per_sample,
        "measured": case.value,
        "predicted": one.predicted,
        "interval": [one.low, one.high],
        "calibrated": after and after.predicted,
        "calibrated_interval": after and [after.low, after.high],
        "candidate": str(candidate),
        "doubts": ", ".join(case.doubts),
    }


# -- the command -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--csv",
        type=Path,
        action="append",
        metavar="FILE",
        help="another table in the same columns, instead of those here",
    )
    parser.add_argument("--source", default="", metavar="TEXT", help="only sources whose name has this text")
    parser.add_argument("--kind", choices=KINDS, help="only figures of this kind")
    parser.add_argument("--rows", action="store_true", help="print every row")
    arguments = parse(parser, source=SMALL_SOURCE)
    rows, wrong = tables_in(arguments.csv or TABLES)
    if rows:
        wrong += judge(arguments, rows)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    if wrong:
        raise SystemExit(2)


def tables_in(paths: Sequence[Path]) -> tuple[list[Row], list[str]]:
    """(the rows of these tables, a line for each table that cannot be read)."""
    rows, wrong = list[Row](), list[str]()
    for path in paths:
        try:
            rows += read_table(path)
        except UserError as error:
            wrong.append(str(error))
    return rows, wrong


LEGEND = (
    "mid, p90: median and 90th percentile of the error; bias: median of predicted over measured, less 1;\n"
    "in: measured inside the 95 % interval; ±: median half-width of the intervals; right: fits or not;\n"
    "rho: Spearman, of 8 rows or more (equal: all figures are the same, and have none)"
)


def judge(arguments: argparse.Namespace, rows: Sequence[Row]) -> list[str]:
    """Prints and writes what is asked for; a line for each row that nobody could read."""
    rows = [row for row in rows if arguments.source.lower() in source_of(row).name.lower()]
    cases, left, unreadable = cases_in(rows)
    if not arguments.csv:
        cases += [case for case in own_trials() if arguments.source.lower() in source_of(case.row).name.lower()]
    cases = [case for case in cases if arguments.kind in (None, kind_of(case))]
    if arguments.small:
        own_cases = {(case.row.source, case.job.model.name): case for case in own_trials()}
        cases = [*cases[:SMALL_ROWS], *own_cases.values()]
    cases, untraceable = traced(cases, on_traced=_told)
    cases, unpredicted = predictable(cases)
    for case, why in untraceable + unpredicted:
        left[source_of(case.row).name, why] += 1
    before, after = uncalibrated(cases), calibrated(cases)
    if arguments.rows:
        print_table("every row (GiB, seconds)", row_lines(before, after), keys=2)
    print(LEGEND)
    print_table("without calibration (* held out)", lines(before), keys=2)
    print_table("after the first row of each source (* held out)", lines(after), keys=2)
    print_table("targets", verdicts(before, after))
    reasons: Counter[str] = Counter()
    for (_, why), count in left.items():
        reasons[why] += count
    print_table("rows left out", [{"why": why, "rows": count} for why, count in reasons.most_common()])
    result: dict[str, Any] = {
        "uncalibrated": lines(before),
        "calibrated": lines(after),
        "targets": verdicts(before, after),
        "left_out": [{"source": name, "why": why, "rows": n} for (name, why), n in sorted(left.items())],
    }
    later = {id(one.case): one for one in after}
    if own := [case for case in cases if case.row.source.startswith(OWN)]:
        result["transfer"] = transfer(own)
    result["rows"] = [as_json(one, later.get(id(one.case))) for one in before]
    write_json(arguments.json, result)
    return unreadable


def _told(made: int, of: int) -> None:
    if sys.stderr.isatty() or made == of:
        print(f"\rtraced {made} of {of} models", end="\n" if made == of else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""Figures in the documents, taken from benchmarks/results: `python benchmarks/docs/figures.py [--write]`.

A figure stands between `<!-- benchmark: NAME -->` and `<!-- end -->`, in a line of prose or as a table of its own; NAME is
one of FIGURES. Without `--write` the command says what differs and exits with 1. A test does the same.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

import yaml

from benchmarks.common import HERE, RESULTS
from benchmarks.docs import search as docs_search
from benchmarks.docs.stages import own_rows
from benchmarks.docs.writing import listed, percent, result, span, table
from benchmarks.predict.published import OWN, OWN_FILES, coverage

ROOT = HERE.parent
DATA = HERE / "data"
LEANING = 15.0  # percent
MARKED = re.compile(r"(<!-- benchmark: (?P<name>[\w-]+) -->)(?P<text>.*?)(<!-- end -->)", re.DOTALL)


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


# -- the predictor ---------------------------------------------------------------------------------------------------


def predictor() -> str:
    """The whole table; a missed target is bold."""
    rows, above = [], ""
    for row in result("predictor"):
        target = row["target"] if row["met"] else f"**{row['target']}**"
        rows.append(["" if row["against"] == above else row["against"], row["measure"], row["ours"], target])
        above = row["against"]
    return table(["against", "measure", "ours", "target"], rows)


def landscape_name(row: dict[str, Any]) -> str:
    return str(row["against"]).split(",")[0].removeprefix("landscape ")


def predictor_short() -> str:
    """The targets that are missed."""
    missed = [row for row in result("predictor") if not row["met"]]
    by_measure: dict[str, list[str]] = {}
    for row in missed:
        where = f"`{landscape_name(row)}`" if row["part"] == "landscapes" else row["against"]
        by_measure.setdefault(f"{row['measure']} (target {row['target']})", []).append(f"{row['ours']} on {where}")
    return "; ".join(f"{measure}: {', '.join(cases)}" for measure, cases in by_measure.items()) or "none"


def predictor_rows12() -> str:
    rows = result("predictor-rows12")
    spearman = [row["value"] for row in rows if row["measure"] == "Spearman"]
    errors = {landscape_name(row): row for row in rows if row["measure"] == "peak error"}
    fine = [row["value"] for row in errors.values() if row["met"]]
    text = f"Spearman is {span(spearman, lambda v: f'{v:.3f}')} on all {len(spearman)} landscapes and the peak error "
    text += f"{span([100 * v for v in fine], lambda v: f'{v:.1f}')} % on {len(fine)} of them"
    missed = [f"{row['ours']} on `{name}`" for name, row in errors.items() if not row["met"]]
    return text + (f"; it stays at {listed(missed)}" if missed else "")


GROUPS = ("held-out sources", "fitted sources", "all")


def _of(cell: str | None) -> str:
    return (cell or "—").replace("/", " of ")


def _published_rows(wanted: Callable[[str], bool]) -> str:
    """Figures of sources before and after their first row calibrated."""
    measured = result("published")
    after = {(row["source"], row["kind"]): row for row in measured["calibrated"]}
    names = ("mid %", "p90 %", "in %", "± %", "right", "rho")
    rows = []
    for row in measured["uncalibrated"]:
        if wanted(row["source"]):
            later = after.get((row["source"], row["kind"]), {})
            both = [f"{_of(row[name])} / {_of(later.get(name))}" for name in names]
            rows.append([row["source"], row["kind"], str(row["rows"]), *both])
    header = ["source", "of", "rows", "median error %", "90th percentile %", "inside 95 % intervals", "half-width %"]
    return table([*header, "fits right", "Spearman"], rows)


def published() -> str:
    """All rows, those of held-out sources and the others."""
    return _published_rows(lambda source: source in GROUPS)


def published_count() -> str:
    with (DATA / "published" / "gpu_published.csv").open() as file:
        rows = list(csv.DictReader(file))
    return f"{len(rows)} rows of {len({row['source_repo_or_url'] for row in rows})} places"


def published_leaning() -> str:
    """Sources whose steps are predicted too long or too short by more than LEANING, without calibration."""
    told = []
    for row in result("published")["uncalibrated"]:
        bias = float(row["bias %"] or 0)
        if row["kind"] == "step" and row["source"] not in GROUPS and abs(bias) > LEANING:
            told.append(f"{row['source']} {abs(bias):.0f} % too {'long' if bias > 0 else 'short'}")
    return listed(told)


def published_kinds() -> str:
    """Errors and coverage of the kinds of jobs whose intervals are widened."""
    names = ("figure", "kind", "rows", "sources", "bias", "median", "widened", "held")
    header = [
        "of",
        "kind of job",
        "rows",
        "sources",
        "median error, signed",
        "without sign",
        "intervals x",
        "then hold",
    ]
    return table(header, [[str(row[name]) for name in names] for row in coverage() if float(row["widened"]) > 1])


def published_targets() -> str:
    """The targets beside what is reached; a missed one is bold."""
    rows = [
        [row["measure"], row["ours"], row["target"] if row["met"] == "yes" else f"**{row['target']}**"]
        for row in result("published")["targets"]
    ]
    return table(["measure", "ours", "target"], rows)


# -- GPUs ------------------------------------------------------------------------------------------------------------


def _gpus() -> dict[str, dict[str, Any]]:
    """Results on GPUs, by the name of their file."""
    return {path.stem: result(path.stem) for path in sorted(RESULTS.glob(OWN_FILES))}


def _gpu_rows(found: dict[str, Any], step: str) -> list[dict[str, Any]]:
    return list(found["steps"][step]["rows"]) if step in found["steps"] else []


def gpu_machines() -> str:
    """Each card's machine, study, OOMs and fidelity."""
    header = ["file", "machine", "`autotune run --budget 150s`", "true OOMs without a cap"]
    header += ["trial / torchrun: a trial before, one after, their mean"]
    columns = (_gpu_machine, _gpu_study, _gpu_ooms, _gpu_fidelity)
    return table(
        header, ([f"`{name}.json`", *(column(found) for column in columns)] for name, found in _gpus().items())
    )


def _gpu_machine(found: dict[str, Any]) -> str:
    hardware = found["hardware"]
    versions = ", ".join(f"{name} {hardware[name]}" for name in ("torch", "deepspeed", "transformers"))
    return f"{hardware['name']}, driver {hardware['driver']}, {hardware['cpus']} CPU cores, {versions}"


def _gpu_study(found: dict[str, Any]) -> str:
    (row,) = _gpu_rows(found, "study")
    best = row["report"]["winner"]["outcome"]["measurement"]
    text = (
        f"{row['trials']} trials in {row['wall s']:.0f} s, verified winner: {best['samples_per_second']:.1f} samples/s"
    )
    return f"{text}, MFU {percent(best['mfu'])}, {row['peak GiB']:.1f} GiB"


def _gpu_ooms(found: dict[str, Any]) -> str:
    """True OOMs among the trials, those that were recognized, and the trials after them."""
    rows = _gpu_rows(found, "trials")
    provoked = [row for row in rows if row["what"].split(":")[0] in ("forward", "backward", "step", "init")]
    right = [row for row in provoked if row["outcome"] == "oom_device"]
    after = [row for row in rows if row["what"] == "a trial after it"]
    fine = [row for row in after if row["outcome"] == "ok"]
    return f"{len(right)} of {len(provoked)} recorded as such; {len(fine)} of {len(after)} trials after them ran"


def _gpu_fidelity(found: dict[str, Any]) -> str:
    rows = [f"{row['ratio']:.3f}" for row in _gpu_rows(found, "fidelity") if "ratio" in row]
    return ", ".join(rows) or "not measured"


def gpu_peaks() -> str:
    """Range of predicted over measured peaks of each card, as they were predicted on the machine."""
    told = []
    for found in _gpus().values():
        rows = [row for step in ("predictions", "held_back") for row in _gpu_rows(found, step)]
        ratios = [row[name] for row in rows if (name := "peak, predicted / measured") in row]
        inside = sum(row.get("in its interval", False) for row in rows)
        text = span(ratios, lambda v: f"{v:.2f}")
        told.append(f"{found['hardware']['name']} {text}, {inside} of {len(ratios)} in their intervals")
    return "; ".join(told)


def gpu_steps() -> str:
    """Range of predicted over measured steps of each card, as today's code predicts them before any trial."""
    ratios: dict[str, list[float]] = {}
    inside: dict[str, int] = {}
    for row in result("published")["rows"]:
        if row["source"].startswith(OWN):
            card, (low, high) = row["source"].removeprefix(OWN).strip(), row["interval"]
            ratios.setdefault(card, []).append(row["predicted"] / row["measured"])
            inside[card] = inside.get(card, 0) + (low <= row["measured"] <= high)
    return "; ".join(
        f"{card} {span(found, lambda v: f'{v:.2f}')}, median {statistics.median(found):.2f}, {inside[card]} of {len(found)} "
        "in their intervals"
        for card, found in ratios.items()
    )


# -- real trainings --------------------------------------------------------------------------------------------------


def launch_overhead() -> str:
    (row,) = [row for row in result("recovery-cpu") if "launch / torchrun, step" in row]
    turns = row["case"].split()[1]
    return f"{turns} turns of each, {row['launch / torchrun, step']:.3f} ± {row['±']:.3f}"


def launch_kills() -> str:
    rows = [row for row in result("recovery-cpu") if "killed" in row["case"]]
    kept = sum(row["every sample as without failures"] for row in rows)
    return (
        f"{sum(row['restarts'] for row in rows)} SIGKILLs of a rank in {len(rows)} trainings: {kept} trained on every sample "
        "as often as a training without failures"
    )


def launch_recovery() -> str:
    """Seconds and steps that a failure costs; trainings of one kind are one row."""
    header = ["failure", "trainings", "restarts", "s to the next optimizer step: median, worst"]
    header += ["steps trained again, most", "every sample as often as without"]
    rows = []
    for part, failure in (("oom", "OOM"), ("rank", "SIGKILL of a rank"), ("node", "node without power for 10 s")):
        timed = [row for row in result("recovery-cpu") if row.get("to the next step, s (median)")]
        if mine := [row for row in timed if row["part"] == part]:
            median = statistics.median(row["to the next step, s (median)"] for row in mine)
            seconds = f"{median:.1f}, {max(row['to the next step, s (most)'] for row in mine):.1f}"
            again = max(row["steps trained again (most)"] for row in mine)
            kept = sum(row["every sample as without failures"] for row in mine)
            restarts = sum(row["restarts"] for row in mine)
            rows.append([failure, str(len(mine)), str(restarts), seconds, str(again), f"{kept} of {len(mine)}"])
    return table(header, rows)


# -- nodes -----------------------------------------------------------------------------------------------------------


def nodes() -> str:
    def seconds(row: dict[str, Any], median: str, worst: str) -> str:
        return f"{row[median]:.1f} ({row[worst]:.1f})"

    header = [
        "failure",
        "over",
        "times",
        "s to the next trial",
        "of it beyond the transport's own",
        "left running",
        "lost",
    ]
    rows = [
        [
            row["failure"],
            row["over"],
            str(row["count"]),
            seconds(row, "next trial, s", "worst"),
            seconds(row, "beyond, s", "worst beyond"),
            str(row["left"]),
            str(row["lost"]),
        ]
        for row in result("nodes")["failures"]
    ]
    return table(header, rows)


def node_trials() -> str:
    return listed([f"{row['more, s']:.2f} s over {row['over']}" for row in result("nodes")["trials"]])


# -- stages ------------------------------------------------------------------------------------------------------------


def stages_own() -> str:
    """ZeRO stages in a recorded study."""
    header = [
        "stage",
        "optimizer offloaded",
        "ran",
        "fastest, samples/s",
        "micro-batch x accumulation",
        "least peak, MiB",
    ]
    return table(header, own_rows())


def stages_published() -> str:
    """Published jobs whose figures differ by the stage alone."""
    found = json.loads((DATA / "published" / "stages.json").read_text())
    return table(found["header"], found["rows"])


# -- frameworks --------------------------------------------------------------------------------------------------------


def frameworks() -> str:
    """The frameworks' commands: as they are, and as printed; one that failed with its reason."""
    rows = []
    for row in result("frameworks-cpu"):
        if row["failed"]:
            rows.append([row["framework"], f"`{shortened(row['command'])}`", "failed", "—", "—", "—"])
            continue
        speeds = [f"{row[name]:.0f}" for name in ("own tokens/s", "tuned tokens/s")]
        gain = f"{row['tuned / own']:.2f} ± {row['±']:.2f}"
        first = [row["framework"], f"`{shortened(row['command'])}`"]
        rows.append([*first, *speeds, gain, f"`{row['winner']}`"])
    header = ["framework", "command", "own, tokens/s", "tuned, tokens/s", "tuned / own", "winner"]
    return table(header, rows)


def shortened(command: str, most: int = 90) -> str:
    return command if len(command) <= most else f"{command[:most].rpartition(' ')[0]} …"


# -- tests -------------------------------------------------------------------------------------------------------------


def failures() -> str:
    """Texts of public threads that the judge is tested with."""
    texts = yaml.safe_load((ROOT / "tests" / "data" / "failures.yaml").read_text())
    return f"{len(texts)} texts, of which it has {sum('missed' in one for one in texts)} wrong"


FIGURES: dict[str, Callable[[], str]] = {
    "predictor": predictor,
    "predictor-short": predictor_short,
    "predictor-rows12": predictor_rows12,
    "published": published,
    "published-targets": published_targets,
    "published-kinds": published_kinds,
    "published-rows": published_count,
    "published-leaning": published_leaning,
    **docs_search.FIGURES,
    "gpu-machines": gpu_machines,
    "gpu-peaks": gpu_peaks,
    "gpu-steps": gpu_steps,
    "launch-overhead": launch_overhead,
    "launch-kills": launch_kills,
    "launch-recovery": launch_recovery,
    "nodes": nodes,
    "node-trials": node_trials,
    "stages-own": stages_own,
    "stages-published": stages_published,
    "frameworks": frameworks,
    "failures": failures,
}


def brought_up_to_date(text: str) -> str:
    """A document with every marked figure as the results have it.

    Raises:
        KeyError: a marker names no figure.
    """
    return MARKED.sub(lambda found: found[1] + FIGURES[found["name"]]() + found[4], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="correct the documents")
    arguments = parser.parse_args()
    stale = False
    for path in documents():
        before = path.read_text()
        after = brought_up_to_date(before)
        if after != before:
            stale = True
            name = str(path.relative_to(ROOT))
            print("\n".join(difflib.unified_diff(before.splitlines(), after.splitlines(), name, name, "", "", 0, "")))
            if arguments.write:
                path.write_text(after)
    raise SystemExit(1 if stale and not arguments.write else 0)


if __name__ == "__main__":
    main()

"""Figures of searches in the documents, for docs/figures.py."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.docs.writing import listed, number, percent, result, span, table
from benchmarks.search.baselines import STRATEGIES as BASELINES
from benchmarks.search.search import END, bound_rows, times_fewer


def search() -> str:
    header = ["landscape", "strategy", "reach 95 %", "98 %", "rungs", "processes", "OOMs", "minutes", "90th percentile"]
    columns = ("trials95", "processes95", "ooms95", "minutes95", "minutes95_p90")
    rows = [
        [row["landscape"], row["strategy"], percent(row["share95"]), percent(row["share98"])]
        + [number(row[column]) for column in columns]
        for row in result("search")
    ]
    return table(header, rows)


def search_minutes() -> str:
    return f"{times_fewer(result('search')) or 0:.1f}"


def search_ooms() -> str:
    """Median out-of-memories of a whole study of ours, over the landscapes."""
    return span([row["ooms"] for row in result("search") if row["strategy"] == "autotune"], number)


def search_tpe() -> str:
    """Where TPE needs fewer minutes than random."""
    minutes: dict[str, dict[str, float]] = {}
    for row in result("search"):
        minutes.setdefault(row["landscape"], {})[row["strategy"]] = row["minutes95"] or float("inf")
    faster = [name for name, by in minutes.items() if by["tpe"] < by["random"]]
    slower = [name for name in minutes if name not in faster]
    text = f"TPE needs fewer minutes than random on {len(faster)} of the {len(minutes)} landscapes"
    return text + (f" (not on {listed(slower)})" if slower else "")


def bounds(strategy: str = "autotune") -> str:
    """How often the bounds of the speed left hold, over all recorded tables, by the number of trials."""
    rows = [row for name in ("search-own", "search-real") for row in result(name)]
    held = bound_rows([row for row in rows if row["strategy"] == strategy])
    said = [
        f"{'At the end' if row['trials'] == END else 'After ' + row['trials'] + ' trials'} {percent(row['it holds'])} "
        f"of the bounds hold ({row['with a bound']} of {row['searches']} searches give one)"
        for row in held
    ]
    return ". ".join(said)


def search_own() -> str:
    rows = {row["strategy"]: row for row in result("search-own")}
    ours, tpe, random = (
        f"{rows[name]['trials95']} rungs and {rows[name]['minutes95']:.2f}" for name in ("autotune", "tpe", "random")
    )
    seeds = rows["autotune"]["seeds"]
    return f"`autotune` reaches 95 % after {ours} simulated minutes. TPE needs {tpe}, random {random} ({seeds} seeds)"


def by_landscape(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Table -> strategy -> row."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result(name):
        found.setdefault(row["landscape"], {})[row["strategy"]] = row
    return found


def spaces() -> str:
    """Trials and minutes to 95 % of each space's best."""
    rows = result("search-spaces")

    def cells(row: dict[str, Any]) -> list[str]:
        at_all = "" if row["share95"] == 1 else f" ({percent(row['share95'])})"
        faster = f"{row['faster']:.3f}"
        keys = ("trials95_of_default", "minutes95_of_default", "trials95", "minutes95")
        told = [number(row[key]) + (at_all if key == "trials95" else "") for key in keys]
        return [row["landscape"], row["space"], str(row["candidates"]), faster, *told]

    header = ["table", "space", "candidates", "its best, times default's", "trials to default's", "minutes"]
    header += ["trials to its own", "minutes"]
    return table(header, [cells(row) for row in rows])


def alone() -> dict[str, int | None]:
    """Table -> median rungs to 95 % of plain TPE."""
    rows = [row for row in [*result("search"), *result("search-own")] if row["strategy"] == "tpe"]
    return {row["landscape"]: row["trials95"] for row in rows}


def wrong() -> str:
    """Median rungs to 95 % under each predictor, a column a landscape; TPE's last."""
    landscapes = by_landscape("search-wrong")
    strategies = dict.fromkeys(row["strategy"] for row in result("search-wrong"))

    def cell(row: dict[str, Any]) -> str:
        reached = "" if row["share95"] == 1 else f" ({percent(row['share95'])})"
        return ("—" if row["trials95"] is None else number(row["trials95"])) + reached

    rows = [[name, *(cell(of[name]) for of in landscapes.values())] for name in strategies]
    tpe = ["plain TPE", *(number(alone()[name] or float("nan")) for name in landscapes)]
    return table(["predictor", *landscapes], [*rows, tpe])


def wrong_bound() -> str:
    """How many cells of that table are within twice TPE's rungs, and which are not."""
    rows, tpe = result("search-wrong"), alone()
    beyond = [
        f"{row['strategy']} on {row['landscape']}"
        for row in rows
        if row["trials95"] is None or row["trials95"] > 2 * (tpe[row["landscape"]] or float("inf"))
    ]
    text = f"Within twice TPE's median: {len(rows) - len(beyond)} of {len(rows)} (seeds each: {rows[0]['seeds']})"
    return text + (f"; beyond it: {listed(beyond)}." if beyond else ".")


def real() -> str:
    """Each recorded table: what is in it, ours and the best other strategy's way to 95 %."""
    header = [
        "table",
        "candidates",
        "that fit",
        "reach 95 %",
        "reach 98 %",
        "trials",
        "minutes",
        "the best other",
        "its minutes",
        "ours / its",
        "told the answer",
    ]
    lines = []
    for name, rows in by_landscape("search-real").items():
        mine, (minutes, other) = rows["autotune"], best_other(rows)
        ratio = mine["minutes95"] / minutes if mine["minutes95"] and minutes < float("inf") else None
        sizes = [str(mine["candidates"]), str(mine["fit"])]
        shares = [percent(mine["share95"]), percent(mine["share98"])]
        cells = [*shares, *(number(mine[column]) for column in ("trials95", "minutes95"))]
        told = mine["least_minutes"] / minutes
        lines.append([name, *sizes, *cells, other, number(minutes), number(ratio), number(told)])
    return table(header, lines)


def best_other(rows: dict[str, dict[str, Any]]) -> tuple[float, str]:
    """(minutes to 95 %, name) of the soonest strategy that is not ours."""
    return min((row["minutes95"] or float("inf"), name) for name, row in rows.items() if name in BASELINES)


def real_summary() -> str:
    tables = by_landscape("search-real")
    sure = sum(rows["autotune"]["share95"] == 1 for rows in tables.values())
    seeds = next(iter(tables.values()))["autotune"]["seeds"]
    third = sum(3 * (rows["autotune"]["minutes95"] or float("inf")) <= best_other(rows)[0] for rows in tables.values())
    told = sum(3 * rows["autotune"]["least_minutes"] <= best_other(rows)[0] for rows in tables.values())
    fewer = times_fewer(result("search-real")) or 0
    return (
        f"all {seeds} seeds reach 95 % on {sure} of {len(tables)} tables. They need at most a third of the best other "
        f"strategy's minutes on {third}, and a search that is told the answer on {told}. In the geometric mean they need "
        f"{fewer:.1f} times fewer minutes"
    )


def cpu_ranks() -> str:
    """How much longer later stages take on CPU ranks, and how well that is known of a table from the others."""
    rows = [row for row in result("cpu-ranks") if row["inside"] is not None]
    inside = sum(row["inside"] * row["rows"] for row in rows) / sum(row["rows"] for row in rows)
    least = min(rows, key=lambda row: row["inside"])
    means = []
    for stage in (1, 2, 3):
        longer = [row["longer"] for row in rows if row["stage"] == stage]
        means.append(f"{statistics.fmean(longer):.2f} ± {statistics.stdev(longer):.2f} ({len(longer)} tables)")
    return (
        f"Steps at stages 1, 2 and 3 are longer than predicted by {listed(means)}, as logarithms. With the mean of the "
        f"other models' tables, 95 % intervals hold {percent(inside)} of all rows, but {percent(least['inside'])} of "
        f"{least['table']} at stage {least['stage']}"
    )


def contest() -> str:
    header = ["script", "our winner", "seconds", "DeepSpeed's", "seconds", "trained, ours / its", "wall clock"]

    def cells(row: dict[str, Any]) -> list[str]:
        times = [number(row["our s"]), number(row["its s"])]
        trained = f"{row['trained, ours / its']:.3f} ± {row['±']:.3f}"
        winners = row["our winner"], row["DeepSpeed's winner"]
        return [
            row["script"],
            winners[0],
            times[0],
            winners[1],
            times[1],
            trained,
            number(row["wall clock, ours / its"]),
        ]

    return table(header, [cells(row) for row in result("vs-deepspeed-cpu")])


def contest_means() -> str:
    rows = result("vs-deepspeed-cpu")
    trained, clock = (
        statistics.geometric_mean(row[name] for row in rows)
        for name in ("trained, ours / its", "wall clock, ours / its")
    )
    same = sum(row["our winner"] == row["DeepSpeed's winner"] for row in rows)
    # the rows' errors are their own: half widths of logarithms add as squares
    width = trained * sum((row["±"] / row["trained, ours / its"]) ** 2 for row in rows) ** 0.5 / len(rows)
    return (
        f"given {clock:.2f} of its time, {trained:.3f} ± {width:.3f} of its speed (geometric means), the same winner on {same} "
        f"of {len(rows)} scripts"
    )


def one_start() -> str:
    """Of the same training on both sides, how far single starts differ; else of all starts around their script's ratio."""
    rows = result("vs-deepspeed-cpu")
    ratios = [ratio for row in rows if row["our winner"] == row["DeepSpeed's winner"] for ratio in row["each start"]]
    if ratios:
        return (
            f"between identical trainings, a pair of starts was at {min(ratios):.2f} to {max(ratios):.2f} of the other"
        )
    apart = [ratio / row["trained, ours / its"] for row in rows for ratio in row["each start"]]
    return f"a pair of starts was at {min(apart):.2f} to {max(apart):.2f} of its script's ratio"


def contest_knobs() -> str:
    """The knobs that the trials of each tuner have turned, in at least one script."""
    rows = result("vs-deepspeed-cpu")
    if "it turned" not in rows[0]:
        return "Both tune stage, micro-batch and accumulation."
    ours, theirs = ({knob for row in rows for knob in row[column]} for column in ("we turned", "it turned"))
    cut = sum("limit" in row["it ended at"] for row in rows)
    said = f" On {cut} of {len(rows)} scripts a limit ended it, and its best so far counts." if cut else ""
    return (
        f"Trials of autotune turned {listed(sorted(ours))}; those of DeepSpeed's tuner {listed(sorted(theirs))}.{said}"
    )


def real_tables() -> str:
    ratios = [row["measured twice, ratio"] - 1 for row in result("real-tables")]
    plain = [row["by torchrun"] for row in result("real-tables")]
    return (
        f"{percent(min(ratios))} to {percent(max(ratios))} (a table's median), and torchrun itself trains one candidate of each "
        f"at {min(plain):.2f} to {max(plain):.2f} of the table's speed"
    )


def own_time() -> str:
    proposals = {row["trials in the study"]: row["ours"] for row in result("proposer") if "proposal" in row["measure"]}
    resumed = next(row["ours"] for row in result("proposer") if "resume" in row["measure"])
    steps = [row["Enter to first measured step, median s"] for row in result("first-step-cpu")]
    said = ", ".join(f"{seconds:.3f} s at {trials:,} trials" for trials, seconds in proposals.items())
    return (
        f"A proposal takes {said}; resuming {max(proposals):,} trials {resumed:.1f} s; from Enter to the first measured step "
        f"of a tiny model on CPU ranks {span(steps, number)} s"
    )


FIGURES = {
    "real-tables": real_tables,
    "own-time": own_time,
    "search-real": real,
    "search-real-summary": real_summary,
    "cpu-ranks": cpu_ranks,
    "vs-deepspeed": contest,
    "vs-deepspeed-means": contest_means,
    "vs-deepspeed-starts": one_start,
    "vs-deepspeed-knobs": contest_knobs,
    "search": search,
    "search-minutes": search_minutes,
    "search-ooms": search_ooms,
    "search-tpe": search_tpe,
    "search-bounds": bounds,
    "search-bounds-wrong": lambda: bounds("adversarial"),
    "search-own": search_own,
    "search-spaces": spaces,
    "search-wrong": wrong,
    "search-wrong-bound": wrong_bound,
}

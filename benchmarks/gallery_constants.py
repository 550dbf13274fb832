"""Whether what one source measured on a card helps to predict another's: `python benchmarks/gallery_constants.py [--json FILE]`.

Each published figure (docs/published.md) is predicted twice: by a fresh predictor, and by one that believes what the nearest job
of other sources on the same card has taught, as a study could believe the nearest entry. Where no other source has such a
card the figure is left out of both. Medians of the error, the share inside the 95 % intervals, and their half-width.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from common import HERE, command_line, parse, print_table, write_json
from published import cases_in
from published_readers import Case
from published_rows import read_table
from published_scores import MEMORY, Scored, figure, learnt, predictor_of, summary, traced, uncalibrated
from published_sources import source_of

from autotune.predict.flops import matmul_parameters
from autotune.predict.predictor import Predictor

TABLE = HERE / "data" / "published" / "gpu_published.csv"


def kind_of(case: Case) -> str:
    return "step" if case.quantity == "step" else "peak" if case.quantity in MEMORY else "decision"


def away(one: Case, other: Case) -> float:
    """In doublings, as `gallery/nearest.py` counts them."""
    sizes = [matmul_parameters(case.job.model.config, case.job.task) or 1e9 for case in (one, other)]
    found = 2 * abs(math.log2(sizes[0] / sizes[1])) + abs(math.log2(one.job.seq_len / other.job.seq_len))
    found += abs(math.log2(one.hardware.count / other.hardware.count))
    return found + 4 * ((one.job.lora is None) != (other.job.lora is None))


def teachers(case: Case, cases: Sequence[Case]) -> Case | None:
    """The nearest figure of the same kind, of another source and of the same card, that is not held out."""
    own = source_of(case.row).name
    there = [
        other
        for other in cases
        if kind_of(other) == kind_of(case)
        and other.hardware.facts == case.hardware.facts
        and source_of(other.row).name != own
        and not source_of(other.row).held_out
    ]
    return min(there, key=lambda other: away(case, other), default=None)


def taught(cases: Sequence[Case]) -> list[tuple[Case, Scored]]:
    """Each case that another source can teach, as predicted by one that believes it."""
    found, known = [], dict[int, Predictor]()
    for case in cases:
        teacher = teachers(case, cases)
        if teacher is None or kind_of(case) == "decision":
            continue
        if id(teacher) not in known:
            known[id(teacher)] = learnt(teacher, predictor_of(teacher))
        predictor = predictor_of(case)
        which = "time" if kind_of(case) == "step" else "memory"
        predictor.believe(**{which: known[id(teacher)]})
        found.append((teacher, Scored(case, *figure(case, predictor.predict(case.candidate)))))
    return found


def line(name: str, scored: Sequence[Scored]) -> dict[str, Any]:
    found = summary(scored)
    return {"of": name, **{key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()}}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", metavar="NAME", help="figures of this model alone")
    parser.add_argument("--length", type=int, metavar="TOKENS", help="figures of sequences of this length alone")
    arguments = parse(parser, model="qwen-1.8b", length=4096)
    chosen = [case for case in cases_in(read_table(TABLE))[0] if arguments.model in (None, case.job.model.name)]
    cases, _ = traced([case for case in chosen if arguments.length in (None, case.job.seq_len)])
    after = [scored for _, scored in taught(cases)]
    before = uncalibrated([scored.case for scored in after])
    lines = []
    for kind in ("peak", "step"):
        for near in (math.inf, 3.0):
            chosen = defaultdict[str, list[Scored]](list)
            for plain, believed in zip(before, after, strict=True):
                teacher = teachers(plain.case, cases)
                if kind_of(plain.case) == kind and teacher is not None and away(plain.case, teacher) <= near:
                    chosen["alone"].append(plain)
                    chosen["with another source of its card"].append(believed)
            which = kind if near == math.inf else f"{kind}, a job within {near:g} doublings"
            lines += [line(f"{which}: {how}", scored) for how, scored in chosen.items()]
    print_table("published figures, predicted", lines)
    write_json(arguments.json, lines)


if __name__ == "__main__":
    main()

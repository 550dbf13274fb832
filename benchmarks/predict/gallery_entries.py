"""The gallery's first entries: `python benchmarks/predict/gallery_entries.py` writes them anew into gallery/entries.

Of our own recorded tables (`benchmarks/data/landscapes_own`), and of published figures (`benchmarks/data/published`) those that
are exact enough: trained with DeepSpeed, the model itself and no stand-in, the card, the stage, the batch and the step known, of
a source of trust A or B. Tables that were simulated (`benchmarks/data/landscapes`) are no measurements and stay out.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.errors import UserError
from autotune.executors.replay import ReplayTable, load_replay_table
from autotune.executors.replay import Row as Recorded
from autotune.gallery.schema import (
    Entry,
    Machine,
    Origin,
    PeakOf,
    Trained,
    Tried,
    Versions,
    check,
    public_architectures,
    public_lora,
    shape_of,
)
from autotune.gallery.warm_start import entries_folder
from autotune.problem.candidate import Candidate, knobs_of, samples
from autotune.problem.gpu_specs import gpu_table
from autotune.problem.job import Job
from autotune.problem.outcome import OutcomeKind
from autotune.util.units import GIB
from benchmarks.common import HERE, command_line, parse
from benchmarks.predict.published.published import cases_in
from benchmarks.predict.published.readers import Case
from benchmarks.predict.published.rows import Row, read_table
from benchmarks.predict.published.sources import source_of

PUBLISHED = HERE / "data" / "published" / "gpu_published.csv"
OWN_ENGINES = ("InternLM/InternEvo",)  # shard as ZeRO does, with code of their own
PEAKS: dict[str, PeakOf] = {"nvml": "process", "allocated": "torch_allocated", "reserved": "torch_reserved"}


def digits(value: float, count: int = 5) -> float:
    return float(f"{value:.{count}g}")


def trained(job: Job) -> Trained:
    config = job.model.config
    vision = config.get("vision_config")
    return Trained(
        model=job.model.name,
        architecture=config["model_type"] if config["model_type"] in public_architectures() else None,
        parameters=job.model.parameters,
        shape=shape_of(config),
        vision=shape_of(vision) if isinstance(vision, dict) else None,
        task=job.task,
        seq_len=job.seq_len,
        tokens_per_sample=digits(job.tokens_per_sample * job.samples_per_row),
        precision=job.precision,
        optimizer=job.optimizer,
        global_batch_size=job.global_batch_size,
        lora=public_lora(str(job.lora)) if job.lora else None,
        attention=job.attention,
    )


def timed(candidate: Candidate, job: Job, seconds: float, peak: tuple[float, PeakOf] | None) -> Tried:
    count = candidate.micro_batch * candidate.accumulation * job.ranks
    tokens = samples(job, candidate) * job.tokens_per_sample
    return Tried(
        knobs=dict(candidate.knobs),
        outcome=OutcomeKind.OK.value,
        step_seconds=digits(seconds),
        samples_per_second=digits(count / seconds),
        tokens_per_second=digits(tokens / seconds),
        peak_gib=digits(peak[0]) if peak else None,
        peak_of=peak[1] if peak else "process",
    )


# -- our own tables ----------------------------------------------------------------------------------------------------


def of_table(path: Path) -> Entry:
    """The entry of a recorded table; what ran out is told by the least that it needs."""
    table = load_replay_table(path)
    job, hardware = table.job(), table.hardware()
    tried = [_tried(table, candidate, row, job) for candidate, row in table.rows.items()]
    fastest = max((one for one in tried if one.outcome == OutcomeKind.OK), key=lambda one: one.tokens_per_second or 0.0)
    memory = digits(hardware.memory_bytes / GIB)
    versions = {name: table.facts["versions"][name] for name in ("torch", "deepspeed", "transformers")}
    return Entry(
        origin=Origin(kind="recorded"),
        machine=Machine(
            device="cuda" if hardware.device == "cuda" else "cpu",
            gpu=hardware.facts,
            name=hardware.name,
            count=hardware.count,
            memory_gib=memory,
            capacity_gib=memory,
            host_memory_gib=digits(hardware.host_memory_bytes / GIB, 3),
        ),
        job=trained(job),
        versions=Versions(**versions),
        space={name: list(domain.values) for name, domain in table.space().knobs.items()},
        candidates=tried,
        winner=tried.index(fastest),
    )


def _tried(table: ReplayTable, candidate: Candidate, row: Recorded, job: Job) -> Tried:
    if row.kind is OutcomeKind.OK and row.step_seconds is not None:
        return timed(candidate, job, row.step_seconds, (row.peak_gib, "process"))
    missing = max(0.0, row.peak_gib - float(table.facts["gpu_memory_gib"]))
    return Tried(knobs=dict(candidate.knobs), outcome=row.kind.value, missing_gib=digits(missing, 3))


# -- published figures -------------------------------------------------------------------------------------------------


def exact(case: Case) -> bool:
    """Whether a figure says enough of what was run, and how, to be an entry. Sources that are held out of every fit stay out:
    the predictor may come to learn from entries."""
    row, source = case.row, source_of(case.row)
    known = source.trust in ("A", "B") and not source.held_out and source.name not in OWN_ENGINES
    deepspeed = row.says("deepspeed", "zero", column="parallel") and not row.says("presumed", column="parallel")
    return known and deepspeed and case.hardware.facts in gpu_table() and not row.unknown("gpu") and not case.doubts


def published(path: Path) -> Iterator[tuple[str, Entry]]:
    """(name, entry) of every job and machine that a source is exact enough of."""
    groups: defaultdict[tuple[object, ...], list[Case]] = defaultdict(list)
    for case in filter(exact, cases_in(read_table(path))[0]):
        job, hardware = case.job, case.hardware
        lora = public_lora(str(job.lora)).partition(",dtype")[0] if job.lora else None
        of_job = (job.model.name, job.seq_len, job.precision, job.optimizer, lora, job.attention)
        key = (source_of(case.row).name, *of_job, hardware.facts, hardware.count)
        groups[key].append(case)
    for cases in groups.values():
        if any(case.quantity == "step" for case in cases):
            entry = of_cases(cases)
            yield named(entry, source_of(cases[0].row).name), entry


def of_cases(cases: Sequence[Case]) -> Entry:
    hardware = cases[0].hardware
    job = next(case.job for case in cases if case.quantity == "step")
    by_candidate: defaultdict[Candidate, list[Case]] = defaultdict(list)
    for case in cases:
        by_candidate[case.candidate].append(case)
    tried = [one for candidate, found in by_candidate.items() if (one := told(candidate, found, job))]
    fastest = max((one for one in tried if one.outcome == OutcomeKind.OK), key=lambda one: one.tokens_per_second or 0.0)
    memory = digits(hardware.memory_bytes / GIB)
    return Entry(
        origin=Origin(kind="published", source=address(cases[0].row)),
        machine=Machine(
            device="cuda",
            gpu=hardware.facts,
            name=hardware.facts or "",
            count=hardware.count,
            nodes=hardware.nodes,
            memory_gib=memory,
            capacity_gib=memory,
        ),
        job=trained(job),
        candidates=tried,
        winner=tried.index(fastest),
    )


def told(candidate: Candidate, cases: Sequence[Case], job: Job) -> Tried | None:
    """What a source says of one candidate; None where it only says that it runs."""
    own = {**knobs_of(job.base_config), **candidate.as_dict}
    whole = Candidate.of(own)
    seconds = [case.value for case in cases if case.quantity == "step"]
    if seconds:
        peaks = [(case.value / GIB, PEAKS[case.quantity]) for case in cases if case.quantity in PEAKS]
        return timed(whole, job, statistics.median(seconds), peaks[0] if peaks else None)
    if any(case.quantity == "decision" and not case.value for case in cases):
        return Tried(knobs=dict(whole.knobs), outcome=OutcomeKind.OOM_DEVICE.value)
    return None


def address(row: Row) -> str:
    text = row["source_repo_or_url"].strip()
    return (
        text.removeprefix("https://") if text.startswith("https://") else "github.com/" + text.removeprefix("github:")
    )


def named(entry: Entry, source: str) -> str:
    job, machine = entry.job, entry.machine
    words = [str(job.model), f"{machine.count}x{machine.gpu or machine.device}", str(job.seq_len)]
    words += (
        [f"lora{job.lora.split(',')[0].removeprefix('r=')}" + ("-saved" if "saved" in job.lora else "")]
        if job.lora
        else []
    )
    return "_".join([*words, source.split("/")[-1].split()[0].lower()])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, default=entries_folder(), metavar="DIR", help="default: gallery/entries")
    arguments = parse(parser)
    found = {path.stem: of_table(path) for path in sorted((HERE / "data" / "landscapes_own").glob("*.json"))}
    for name, entry in published(PUBLISHED):
        if name in found:
            raise SystemExit(f"two entries are named {name}")
        found[name] = entry
    arguments.out.mkdir(parents=True, exist_ok=True)
    refused = 0
    for name, entry in found.items():
        try:
            check(entry)
        except UserError as error:
            print(f"left out: {name}: {error}")
            refused += 1
            continue
        (arguments.out / f"{name}.json").write_text(entry.text())
    print(f"{len(found) - refused} entries in {arguments.out}")


if __name__ == "__main__":
    main()

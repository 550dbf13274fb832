"""Does training run at the speed that was exported? `python benchmarks/fidelity.py [STUDY] [--steps 35] [--rounds 3]`.

Takes a study's winner, measures it again as verification does and trains with the exported config under plain
DeepSpeed, in turn, and prints both beside what `meta.json` says. On CPU ranks both run with the same allocator
settings and threads. Without STUDY a small model is tuned on two CPU ranks first; under `--small` a recorded table takes
the place of that search.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import HERE, command_line, parse, print_table, write_json
from ranks import autotune_run, opened, train_plainly

from autotune.executors.base import VERIFY, Effort
from autotune.results.export import deepspeed_config
from autotune.search.study import StudyStore

WARMUP_STEPS = 5  # of train_plain.py
TABLE = HERE / "data" / "landscapes_own" / "tiny-llama_2xcpu.csv.gz"
TUNED_HERE = ("--model", "tiny-gemma-2", "--device", "cpu", "--gpus", "2", "--budget", "90s")
REPLAYED = ("--executor", f"replay:{TABLE}")


def tuned(folder: Path, options: tuple[str, ...]) -> str:
    """A study made for this comparison; the path that loads it."""
    done = autotune_run(*options, "--study", "fidelity", cwd=folder)
    if done.code:
        raise SystemExit(done.stderr[-3000:])
    return str(folder / "runs" / "fidelity")


def compare(store: StudyStore, folder: Path, rounds: int, steps: int, effort: Effort) -> dict[str, Any]:
    winner, job, hardware = store.winner, store.job, store.hardware
    if winner is None or winner.outcome is None or winner.outcome.measurement is None:
        raise SystemExit("the study has no winner")
    config = deepspeed_config(winner.candidate, job)
    again: list[float] = []
    trained: list[float] = []
    with opened(job, hardware, folder, [winner.candidate]) as executor:
        for at in range(rounds):
            session = executor.session(winner.candidate, str(at))
            measured = session.measure(winner.candidate, effort, 300.0).measurement
            session.close()
            assert measured is not None
            again.append(measured.samples_per_second)
            found = train_plainly(job, config, winner.candidate.checkpointing, steps, hardware.device)
            trained.append(found["samples_per_second"])
    meta = winner.outcome.measurement.samples_per_second
    return {
        "hardware": str(hardware),
        "winner": str(winner.candidate),
        "meta.json samples/s": meta,
        "verified again": statistics.median(again),
        "trained": statistics.median(trained),
        "trained / meta": statistics.median(trained) / meta,
        "trained / verified again": statistics.median(trained) / statistics.median(again),
        "median of paired ratios": statistics.median(t / a for t, a in zip(trained, again, strict=True)),
        "trained_all": trained,
        "again_all": again,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("study", nargs="?")
    parser.add_argument("--steps", type=int, default=35)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parse(parser, steps=WARMUP_STEPS + 3, rounds=1)
    effort = Effort(min_steps=2, max_steps=3, min_seconds=0.0) if arguments.small else VERIFY
    with tempfile.TemporaryDirectory() as name:
        study = arguments.study or tuned(Path(name), REPLAYED if arguments.small else TUNED_HERE)
        found = compare(StudyStore.load(study), Path(name), arguments.rounds, arguments.steps, effort)
    title = f"{arguments.steps - WARMUP_STEPS} steps under plain DeepSpeed, {arguments.rounds} rounds in turn"
    print_table(title, [{key: value for key, value in found.items() if not isinstance(value, list)}])
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()

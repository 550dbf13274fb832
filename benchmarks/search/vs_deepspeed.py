"""The real `deepspeed --autotuning tune` against `autotune run`, on six training scripts (`contest/`), one CPU rank.

`python benchmarks/search/vs_deepspeed.py [--only decoder,lora] [--starts 6] [--json FILE]`, whose rows of other scripts are kept

Both tune the same knobs, ZeRO stage, micro-batch and accumulation, one after the other on a machine that does nothing
else. DeepSpeed's tuner goes first; ours is held to the global batch that it chose, so that both winners train the same.
Then both trainings take turns under plain torchrun, and are started anew several times: one start is several percent
faster than another of the same (`benchmarks/trials/inturn.py`). It needs `pip install deepspeed[autotuning]` and
Debian's pdsh; without them the small form leaves DeepSpeed's tuner out and says so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.problem.candidate import Candidate
from autotune.script.script import command
from autotune.search.study import StudyStore
from benchmarks.common import HERE, command_line, kept_rows, parse, print_table, tree, write_json
from benchmarks.trials.inturn import T95, over_starts, samples_per_second, take_turns, torchrun
from benchmarks.trials.ranks import autotune_run, plain_environment

GLOBAL_BATCH = 32  # sequences a step, at the most
OWN_MICRO_BATCH = 4
TURNS = 4  # of each training, a start
SHARE = 0.3  # of the seconds that DeepSpeed's tuner takes, as our budget
ADAMW = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
PLAIN = {"optimizer": ADAMW, "zero_allow_untested_optimizer": True}
BF16 = {**PLAIN, "bf16": {"enabled": True}}
# Script -> what its config says beside batch and stage. Trainer brings an optimizer of its own.
SCRIPTS: dict[str, dict[str, Any]] = {
    "decoder": PLAIN,
    "loss_backward": BF16,
    "encoder": PLAIN,
    "lora": BF16,
    "images": PLAIN,
    "trainer": {"zero_allow_untested_optimizer": True},
}
OWN_STAGE = {"loss_backward": 1}  # DeepSpeed refuses it at stage 0
TRAINER_FLAGS = {
    "train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
}
SPACE = f"""
knobs:
  zero_stage: [0, 1, 2, 3]
  train_micro_batch_size_per_gpu: {{from: 1, to: {GLOBAL_BATCH}}}
  gradient_accumulation_steps: {{from: 1, to: {GLOBAL_BATCH}}}
"""


@dataclass(frozen=True)
class Found:
    """What a tuner found: the training with its winner, ready to start."""

    argv: list[str]
    seconds: float
    winner: str


def arguments_of(name: str, config: Path, micro_batch: int, accumulation: int) -> list[str]:
    """The script and its arguments, with a batch where it stands in them."""
    script = str(HERE / "search" / "contest" / f"{name}.py")
    if name != "trainer":
        return [script, "--deepspeed", "--deepspeed_config", str(config)]
    batch = dict(zip(TRAINER_FLAGS.values(), (micro_batch, accumulation), strict=True))
    flags = [str(word) for pair in batch.items() for word in pair]
    lasting = ["--max_steps", "100000", "--save_strategy", "no", "--report_to", "none", "--output_dir", "out"]
    return [script, "--deepspeed", str(config), *flags, *lasting, "--use_cpu"]


def by_deepspeed(name: str, folder: Path) -> tuple[Found, int]:
    """What DeepSpeed's tuner finds, and the global batch of it.

    Raises:
        RuntimeError: it found nothing; with the end of what it said.
    """
    config = {
        **SCRIPTS[name],
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto" if name == "trainer" else 1,
        "zero_optimization": {"stage": [0, 1, 2, 3]},
        "autotuning": {
            "enabled": True,
            "fast": True,
            "metric": "throughput",
            "start_profile_step": 3,
            "end_profile_step": 5,
            "max_train_batch_size": GLOBAL_BATCH,
            "num_tuning_micro_batch_sizes": 3,
            **({"arg_mappings": TRAINER_FLAGS} if name == "trainer" else {}),
        },
    }
    start = folder / "ds.json"
    start.write_text(json.dumps(config))
    env = {
        **plain_environment("cpu", 1),
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    words = ["deepspeed", "--autotuning", "tune", "--num_gpus", "1", *arguments_of(name, start, OWN_MICRO_BATCH, 1)]
    began = time.monotonic()
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=1500)
    seconds = time.monotonic() - began
    found = folder / "autotuning_results" / "ds_config_optimal.json"
    if not found.exists():
        raise RuntimeError(f"DeepSpeed's autotuner gave no config: {done.stdout[-2000:]} {done.stderr[-2000:]}")
    best = json.loads(found.read_text())
    micro, accumulation = best["train_micro_batch_size_per_gpu"], best["gradient_accumulation_steps"]
    (folder / "found.json").write_text(json.dumps(best))
    winner = f"z{best['zero_optimization']['stage']} mb{micro} ga{accumulation}"
    return Found(arguments_of(name, folder / "found.json", micro, accumulation), seconds, winner), micro * accumulation


def by_autotune(name: str, folder: Path, global_batch: int, limits: list[str]) -> Found:
    """What `autotune run` finds for a script that begins with a small micro-batch.

    Raises:
        RuntimeError: it found nothing; with the end of what it said.
    """
    micro = min(OWN_MICRO_BATCH, global_batch)
    batch = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": global_batch // micro}
    own = folder / "own.json"
    own.write_text(json.dumps({**SCRIPTS[name], **batch, "zero_optimization": {"stage": OWN_STAGE.get(name, 0)}}))
    (folder / "space.yaml").write_text(SPACE)
    options = ["--device", "cpu", "--gpus", "1", "--space", "space.yaml", "--study", name, *limits]
    options += ["--global-batch-size", str(global_batch)]
    began = time.monotonic()
    done = autotune_run(*options, script=arguments_of(name, own, *batch.values()), cwd=folder)
    seconds = time.monotonic() - began
    if done.code:
        raise RuntimeError(f"autotune run: exit {done.code}: {done.stderr[-3000:]}")
    script = StudyStore.load(str(folder / "runs" / name)).job.script
    assert script is not None
    winner = Candidate.of(done.report["winner"]["candidate"])
    exported = (folder / done.report["files"][0]).resolve()
    return Found(list(command(script, winner, str(exported))), seconds, str(winner))


def contest(name: str, folder: Path, with_theirs: bool, limits: list[str], starts: int) -> dict[str, Any]:
    """A row: what each tool took and found, and how fast both trainings are."""
    global_batch, theirs = GLOBAL_BATCH, None
    if with_theirs:
        theirs, global_batch = by_deepspeed(name, made(folder / "theirs"))
        limits = limits or ["--budget", f"{theirs.seconds * SHARE:.0f}s"]
    ours = by_autotune(name, made(folder / "ours"), global_batch, limits)
    row: dict[str, Any] = {"script": name, "our winner": ours.winner, "our s": ours.seconds}
    side = torchrun("ours", ours.argv, folder / "ours", 1)
    if theirs is None:
        take_turns([side], TURNS)
        return row | {"samples/s": samples_per_second(side)} | dict.fromkeys(AGAINST)
    their_side = torchrun("theirs", theirs.argv, folder / "theirs", 1)
    trained = over_starts(side, their_side, TURNS, starts)
    speed, their_speed = trained.samples_per_second
    wall_clock = ours.seconds / theirs.seconds
    said = (theirs.winner, theirs.seconds, their_speed, trained.ratio, trained.half_width, wall_clock, trained.ratios)
    return row | {"samples/s": speed} | dict(zip(AGAINST, said, strict=True))


AGAINST = (
    "DeepSpeed's winner",
    "its s",
    "its samples/s",
    "trained, ours / its",
    "±",
    "wall clock, ours / its",
    "each start",
)


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--only", default="", help=f"comma-separated, of {', '.join(SCRIPTS)}")
    parser.add_argument("--budget", help="of ours; default: 0.3 of what DeepSpeed's tuner took")
    parser.add_argument("--starts", type=int, default=6, help="of both trainings")
    arguments = parse(parser, only="images", budget="5m")
    if arguments.starts not in (even := [n for n in T95 if n % 2 == 0]):
        parser.error(f"--starts: one of {even}, so that each side begins as often, and an interval can be taken")
    tuner = shutil.which("pdsh") is not None and importlib.util.find_spec("tabulate") is not None
    if not tuner or arguments.small:
        print("DeepSpeed's autotuner needs pdsh and tabulate (apt-get install pdsh; pip install deepspeed[autotuning])")
        if not arguments.small:
            raise SystemExit(1)
    names = [name for name in SCRIPTS if not arguments.only or name in arguments.only.split(",")]
    if not names:
        parser.error(f"--only {arguments.only}: none of {', '.join(SCRIPTS)}")
    limits = ["--budget", arguments.budget] if arguments.budget else []
    limits += ["--max-trials", "1"] if arguments.small else []
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            row = contest(name, Path(scratch) / name, not arguments.small, limits, arguments.starts)
            rows.append(row | {"code": tree("autotune")})
            print(json.dumps(rows[-1]), flush=True)
            write_json(arguments.json, [*kept_rows(arguments.json, "script", names), *rows])
    shown = [{name: value for name, value in row.items() if name not in ("each start", "code")} for row in rows]
    print_table("DeepSpeed's autotuner and autotune, one CPU rank, both winners trained in turn", shown)
    for measure, target in (("trained, ours / its", ">= 1.05"), ("wall clock, ours / its", "<= 0.33")):
        if found := [row[measure] for row in rows if row[measure]]:
            print(f"{measure}, geometric mean: {statistics.geometric_mean(found):.3f} (target {target})")


if __name__ == "__main__":
    main()

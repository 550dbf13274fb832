"""The real `deepspeed --autotuning tune` against `autotune run`, on six training scripts (`contest/`), one CPU rank.

`python benchmarks/search/vs_deepspeed.py [--only decoder,lora] [--limit 360] [--starts 6] [--resume] [--json FILE]`

Rows of other scripts are kept, and each row is written when its script is done; `--resume` leaves out scripts with a row
of this code. Both tune ZeRO stage, micro-batch and accumulation, and of overlap, buckets, offload and checkpointing all
that each tuner can have, one after the other on a machine that does nothing else. DeepSpeed's tuner goes first, to its
end or to the limit; ours is held to the global batch that it chose, so that both winners train the same.
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
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

import psutil
from ruamel.yaml import YAML

from autotune.problem.candidate import Candidate
from autotune.script.script import candidate_of_config, command
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
  overlap_comm: [false, true]
  reduce_bucket_size: [50_000_000, 500_000_000, 1_000_000_000]
  contiguous_gradients: [false, true]
  offload_optimizer: [none, cpu]
  activation_checkpointing: [false, true]
"""
BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


RESULTS = "autotuning_results"  # folder of DeepSpeed's tuner
NOT_TUNED = {
    "offload_optimizer": "never: of the user's zero_optimization it reads the stage",
    "activation_checkpointing": "never: the script's own, no key of the config",
}


@dataclass(frozen=True)
class Found:
    """What a tuner found: the training with its winner, ready to start."""

    argv: list[str]
    seconds: float
    winner: str
    turned: dict[str, int]  # knob -> number of values that its trials had
    ended: str = ""  # how DeepSpeed's tuner ended


def spaces() -> list[dict[str, Any]]:
    """Rows of the knobs that each tuner can have, the second column by the code of the installed DeepSpeed."""
    from deepspeed.autotuning import constants

    theirs: dict[str, str] = {"zero_stage": "0, 1, 2, 3", BATCH[0]: "found by runs", BATCH[1]: "follows"}
    for stage in (1, 2, 3):
        for name, values in getattr(constants, f"DEFAULT_TUNING_SPACE_ZERO_{stage}")["zero_optimization"].items():
            if isinstance(values, list):
                before = theirs.get(name, f"{', '.join(f'{value:g}' for value in values)} at stage")
                theirs[name] = f"{before}{',' if name in theirs else ''} {stage}"
    ours = {name: str(values) for name, values in YAML().load(SPACE)["knobs"].items()}
    names = dict.fromkeys([*ours, *theirs])
    return [
        {"knob": name, "autotune": ours.get(name), "DeepSpeed's tuner": theirs.get(name, NOT_TUNED.get(name))}
        for name in names
    ]


def turned(candidates: Iterable[Candidate]) -> dict[str, int]:
    """Number of values of each knob that had more than one, a missing knob not counted."""
    values: dict[str, set[Any]] = {}
    for candidate in candidates:
        for name, value in candidate.knobs:
            values.setdefault(name, set()).add(value)
    return {name: len(found) for name, found in sorted(values.items()) if len(found) > 1}


def arguments_of(name: str, config: Path, micro_batch: int, accumulation: int) -> list[str]:
    """The script and its arguments, with a batch where it stands in them."""
    script = str(HERE / "search" / "contest" / f"{name}.py")
    if name != "trainer":
        return [script, "--deepspeed", "--deepspeed_config", str(config)]
    batch = dict(zip(TRAINER_FLAGS.values(), (micro_batch, accumulation), strict=True))
    flags = [str(word) for pair in batch.items() for word in pair]
    lasting = ["--max_steps", "100000", "--save_strategy", "no", "--report_to", "none", "--output_dir", "out"]
    return [script, "--deepspeed", str(config), *flags, *lasting, "--use_cpu"]


def by_deepspeed(name: str, folder: Path, limit_seconds: float) -> tuple[Found, int]:
    """What DeepSpeed's tuner finds, to its end or to the limit, and the global batch of it.

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
            "fast": False,  # overlap and buckets too
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
        "PYTHONWARNINGS": "ignore",  # the tuner takes the word "error" in a warning for a failed experiment
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    words = ["deepspeed", "--autotuning", "tune", "--num_gpus", "1", *arguments_of(name, start, OWN_MICRO_BATCH, 1)]
    began, log = time.monotonic(), folder / "tuner.log"
    with log.open("w") as output:
        tuner = psutil.Popen(words, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            tuner.wait(limit_seconds)
            ended = "its end"
        except psutil.TimeoutExpired:
            ended = f"the limit of {limit_seconds:.0f} s"
        finally:
            with suppress(psutil.NoSuchProcess):
                for process in (*tuner.children(recursive=True), tuner):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            tuner.wait()
    seconds = time.monotonic() - began
    tried = [
        (json.loads(metrics.read_text())["throughput"], json.loads((metrics.parent / "ds_config.json").read_text()))
        for metrics in (folder / RESULTS).glob("*/metrics.json")
    ]
    chosen = folder / RESULTS / "ds_config_optimal.json"
    if not tried:
        raise RuntimeError(f"DeepSpeed's autotuner measured nothing in {seconds:.0f} s: {log.read_text()[-4000:]}")
    best = json.loads(chosen.read_text()) if chosen.exists() else max(tried, key=lambda one: one[0])[1]
    best.pop("autotuning", None)
    (folder / "found.json").write_text(json.dumps(best))
    micro, accumulation = (int(best[key]) for key in BATCH)
    found = Found(
        arguments_of(name, folder / "found.json", micro, accumulation),
        seconds,
        str(candidate_of_config(best)),
        turned(candidate_of_config(one) for _, one in tried),
        f"{ended}, {len(tried)} experiments",
    )
    return found, micro * accumulation


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
    store = StudyStore.load(str(folder / "runs" / name))
    script = store.job.script
    assert script is not None
    winner = Candidate.of(done.report["winner"]["candidate"])
    exported = (folder / done.report["files"][0]).resolve()
    tried = turned(record.candidate for record in store.records())
    return Found(list(command(script, winner, str(exported))), seconds, str(winner), tried)


def contest(name: str, folder: Path, limit_seconds: float | None, limits: list[str], starts: int) -> dict[str, Any]:
    """A row: what each tool took and found, and how fast both trainings are; without a limit, ours alone."""
    global_batch, theirs = GLOBAL_BATCH, None
    if limit_seconds is not None:
        theirs, global_batch = by_deepspeed(name, made(folder / "theirs"), limit_seconds)
        limits = limits or ["--budget", f"{theirs.seconds * SHARE:.0f}s"]
    ours = by_autotune(name, made(folder / "ours"), global_batch, limits)
    row: dict[str, Any] = {"script": name, "our winner": ours.winner, "our s": ours.seconds, "we turned": ours.turned}
    side = torchrun("ours", ours.argv, folder / "ours", 1)
    if theirs is None:
        take_turns([side], TURNS)
        return row | {"samples/s": samples_per_second(side)} | dict.fromkeys(AGAINST)
    their_side = torchrun("theirs", theirs.argv, folder / "theirs", 1)
    trained = over_starts(side, their_side, TURNS, starts)
    speed, their_speed = trained.samples_per_second
    said = (
        theirs.winner,
        theirs.seconds,
        theirs.turned,
        theirs.ended,
        their_speed,
        trained.ratio,
        trained.half_width,
        ours.seconds / theirs.seconds,
        trained.ratios,
    )
    return row | {"samples/s": speed} | dict(zip(AGAINST, said, strict=True))


AGAINST = (
    "DeepSpeed's winner",
    "its s",
    "it turned",
    "it ended at",
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
    parser.add_argument(
        "--limit", type=float, default=360.0, help="seconds of DeepSpeed's tuner, whose best so far then counts"
    )
    parser.add_argument("--starts", type=int, default=6, help="of both trainings")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --json that this code has measured")
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
    if not arguments.small:
        print_table("spaces of both tuners", spaces(), keys=1)
    code = tree("autotune")
    rows = [row for row in kept_rows(arguments.json, "script", ()) if arguments.resume and row["code"] == code]
    names = [name for name in names if name not in {row["script"] for row in rows}]
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            limit_seconds = None if arguments.small else arguments.limit
            rows.append(contest(name, Path(scratch) / name, limit_seconds, limits, arguments.starts) | {"code": code})
            print(json.dumps(rows[-1]), flush=True)
            others = kept_rows(arguments.json, "script", [row["script"] for row in rows])
            order = list(SCRIPTS)
            write_json(arguments.json, sorted([*others, *rows], key=lambda row: order.index(row["script"])))
    shown = [{name: value for name, value in row.items() if name not in ("each start", "code")} for row in rows]
    print_table("DeepSpeed's autotuner and autotune, one CPU rank, both winners trained in turn", shown)
    for measure, target in (("trained, ours / its", ">= 1.05"), ("wall clock, ours / its", "<= 0.33")):
        if found := [row[measure] for row in rows if row[measure]]:
            print(f"{measure}, geometric mean: {statistics.geometric_mean(found):.3f} (target {target})")


if __name__ == "__main__":
    main()

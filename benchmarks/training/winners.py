"""Winners trained without autotune: does the printed command train what the user's own command trains?

Each script is tuned by `autotune run` on two CPU ranks. Configs that differ from the user's own are then trained by the
command that autotune prints, in processes without autotune, next to the user's own command, on the same data and seed.
Losses and all weights are compared after the same number of optimizer steps.

- If the winner is the user's own config, the measured candidate that differs in most knobs takes its place.
- The launcher of the printed command starts the user's command too. A script that names no seed gets one.
- Beyond rounding, two runs of the user's own command give the noise floor. The second has other random numbers from the
  first forward on and another number of CPU threads.
- A difference is the norm of the weights' difference, divided by the norm of what the user's own training changed.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from autotune.problem.candidate import Candidate
from autotune.results.console import train_with
from autotune.results.export import environment_of, export_store
from autotune.script.profile import own_candidate
from autotune.search.study import StudyStore
from autotune.search.trials import Record
from autotune.workers.jit_ops import FOLDER, own_folder
from benchmarks.common import command_line, kept_rows, parse, print_table, write_json
from tests.conftest import SCRIPTS, free_port

RANKS = 2
STEPS = 24  # optimizer steps that are trained; the certificate compares five
# differences that rounding alone makes; Adam amplifies that of gradients near zero
LEAST = {"fp32": 2e-3, "bf16": 2e-2}
FLOORS = 4.0  # tolerated multiples of the floor
SHOWN = 0.5  # largest difference that may be tolerated and still show something
_MOST_WHY = 80  # characters of a reason in the table
_OBSERVER = Path(__file__).parent / "plainly"
_AUTO = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"), "auto")
_SMALL = {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000}
_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2, **_SMALL},
}
_TRAINER = "--deepspeed ds.json --max_steps 60 --use_cpu --output_dir out --report_to none --save_strategy no"
_HYDRA = """
data: {batch_size: 4}
deepspeed:
  train_micro_batch_size_per_gpu: ${data.batch_size}
  gradient_accumulation_steps: 2
  zero_optimization: {stage: 1, reduce_bucket_size: 500000}
  optimizer: {type: Adam, params: {lr: 0.001, torch_adam: true}}
"""


@dataclass(frozen=True)
class Style:
    """A training script of one style."""

    what: str  # the style in words
    command: str
    files: dict[str, str] = field(default_factory=dict)
    options: str = ""  # of `autotune run`
    needs: str = ""  # package that is not installed everywhere


STYLES = {
    "trainer": Style(
        "HF Trainer, DeepSpeed config with auto",
        f"trainer.py {_TRAINER} --per_device_train_batch_size 2 --gradient_accumulation_steps 4",
        {"ds.json": json.dumps({**_AUTO, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 1}})},
    ),
    "plain": Style(
        "plain loop, config file, mapped flag",
        "plain.py --deepspeed_config ds.json --batch_size 2 --steps 200",
        {"ds.json": json.dumps(_CONFIG)},
        "--map train_micro_batch_size_per_gpu=--batch_size",
    ),
    "in_code": Style("config in code, rows dropped by `random`", "public.py latent_diffusion"),
    "all_ranks": Style("flag of all ranks' batch", "public.py imagenet --batch-size 16 --iter-size 2"),
    "whole_step": Style("flags of whole step and micro-batch", "public.py rlhf"),
    "tokens": Style("flag of the batch in tokens", "public.py tokens"),
    "click": Style("click options, noise, average of weights", "public.py minrf"),
    "surgery": Style("gradients of two tasks projected", "public.py surgery"),
    "webdataset": Style("stream without length, workers", "public.py webdataset"),
    "by_hand": Style(
        "accumulation by hand, stage 3",
        "several_backwards.py --deepspeed_config ds.json",
        {
            "ds.json": json.dumps(
                {**_CONFIG, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 3, **_SMALL}}
            )
        },
    ),
    "tokens_weighted": Style("loss divided by the step's tokens", "styles.py tokens_weighted"),
    "schedule_in_loop": Style("schedule stepped in the loop, dropout", "styles.py schedule_in_loop"),
    "nanogpt": Style("names set by --name=value", "styles.py nanogpt --batch_size=6 --gradient_accumulation_steps=8"),
    "accumulates": Style("accumulation by hand, flag", "styles.py accumulates"),
    "cut_by_loop": Style("whole steps that the loop cuts", "styles.py cut_by_loop"),
    "gradient_penalty": Style("double backward", "styles.py gradient_penalty"),
    "multitask": Style("tasks take turns in micro-batches", "styles.py multitask"),
    "mean_teacher": Style("teacher averages the weights by micro-batches", "styles.py mean_teacher"),
    "two_models": Style("second model with negatives from the batch", "styles.py two_models"),
    "packed_stream": Style("stream packed end to end", "styles.py packed_stream"),
    "gan": Style("generator and discriminator", "styles.py gan"),
    "accelerated": Style("accelerate, accumulate(), clipping", "styles.py accelerated"),
    "token_mean": Style("mean over a micro-batch's own tokens", "styles.py token_mean"),
    "contrastive": Style("negatives gathered from all ranks", "styles.py contrastive"),
    "one_cycle": Style("schedule over the loader's optimizer steps", "styles.py one_cycle"),
    "rdrop": Style("two forwards that shall agree, dropout", "styles.py rdrop"),
    "boundary": Style("loop that names the end of a step", "styles.py boundary"),
    "unfreeze": Style("layer that is frozen at first", "styles.py unfreeze"),
    "iter_decay": Style("learning rate by iterations, in the loop", "styles.py iter_decay"),
    "ctc": Style("speech, batches of like lengths, CTC", "styles.py ctc"),
    "codebook": Style("codes that average their inputs", "styles.py codebook"),
    "stochastic_depth": Style("dropped layers, more by forwards", "styles.py stochastic_depth"),
    "fabric": Style("Lightning Fabric", "styles.py fabric", needs="lightning"),
    "hydra": Style("Hydra", "styles.py hydra data.batch_size=4", {"conf.yaml": _HYDRA}, needs="hydra"),
}


# -- one script --------------------------------------------------------------------------------------------------------


def _environment(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    made = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return {**made, FOLDER: str(own_folder("cpu")), **more}


def _path_with(folder: Path) -> str:
    """Return Python's path with a folder in front."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def _prepared(name: str, folder: Path) -> None:
    style = STYLES[name]
    for source in (*SCRIPTS.glob("*.py"), *(SCRIPTS / "cases").glob("*.py")):
        if source.name == style.command.split()[0] or source.name == "public.py":
            shutil.copy(source, folder)
    for file, text in style.files.items():
        (folder / file).write_text(text)


def _tuned(name: str, folder: Path, budget: str, trials: int) -> StudyStore | str:
    """Tune a script by `autotune run`. Return its study, or the line with which it ended."""
    style = STYLES[name]
    options = f"--device cpu --gpus {RANKS} --budget {budget} --max-trials {trials} --study s {style.options}"
    words = [sys.executable, "-m", "autotune", "run", *options.split(), "--", *shlex.split(style.command)]
    environment = _environment(PYTHONPATH=_path_with(Path(__file__).parents[2]))
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    (folder / "tune.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        return f"exit {done.returncode}: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}"
    return StudyStore.load("s", None, folder / "runs")


def _followed(store: StudyStore, most: int) -> list[Record]:
    """Return the trials to train: the winner, then the measured candidates that differ in most knobs from the user's own."""
    assert store.job.script is not None
    own = own_candidate(store.job.script)
    found = {
        one.candidate: one
        for one in store.records()
        if one.outcome is not None and one.outcome.ok and one.candidate != own and one.outcome.trace is not None
    }
    winner = store.winner.candidate if store.winner is not None else None
    return sorted(
        found.values(), key=lambda one: (one.candidate != winner, -len(_differences(one.candidate, own)), one.number)
    )[:most]


def _differences(candidate: Candidate, own: Candidate) -> list[str]:
    """Return the knobs that differ, as `knob own -> candidate`."""
    a, b = own.as_dict, candidate.as_dict
    short = {"train_micro_batch_size_per_gpu": "micro-batch", "gradient_accumulation_steps": "accumulation"}
    return [
        f"{short.get(key, key)} {a.get(key, '-')} -> {b.get(key, '-')}"
        for key in dict.fromkeys([*a, *b])
        if a.get(key) != b.get(key)
    ]


def _with_port(words: list[str]) -> list[str]:
    """Return a command with a free port for the rendezvous, since trainings of others may have the launchers' default."""
    options = {"torchrun": "--master-port", "deepspeed": "--master_port", "accelerate": "--main_process_port"}
    at = next(at for at, word in enumerate(words) if Path(word).name in options)
    behind = at + 2 if words[at] == "accelerate" else at + 1
    return [*words[:behind], options[Path(words[at]).name], str(free_port()), *words[behind:]]


def _launched(printed: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Return the user's words behind the launcher of a printed command, without the variables in front of it."""
    at = next(at for at, word in enumerate(printed) if Path(word).name == typed[0])
    return [*itertools.dropwhile(lambda word: "=" in word and not word.startswith("-"), printed[:at]), *typed]


def _trained(words: Sequence[str], folder: Path, name: str, **variables: str) -> dict[str, Any] | str:
    """Train by a command without autotune. Return what the observer saw, or the last line of the log."""
    import torch

    typed = list(words)
    while "=" in typed[0] and not typed[0].startswith("-"):  # variables in front of a printed command
        key, _, value = typed.pop(0).partition("=")
        variables[key] = value
    report, variables = folder / f"{name}.pt", {"OBSERVED_STEPS": str(STEPS), **variables}
    variables |= {"PYTHONPATH": _path_with(_OBSERVER), "OBSERVED": str(report)}
    shutil.rmtree(folder / "out", ignore_errors=True)
    done = subprocess.run(
        _with_port(typed), cwd=folder, env=_environment(**variables), capture_output=True, text=True, timeout=300
    )
    (folder / f"{name}.log").write_text(f"{shlex.join(words)}\n{done.stdout}{done.stderr}")
    if not report.exists():
        said = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.strip().splitlines()
        why = re.sub(r"^\[rank\d+\]: ", "", said[0]) if said else f"exit {done.returncode}"
        return f"ended before {STEPS} steps: {why}"[:200]
    found: dict[str, Any] = torch.load(report)
    return found


def _command(store: StudyStore, record: Record, folder: Path, name: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that is printed for a trial, and variables that put its config where the script has its own."""
    config = folder / f"{name}.json"
    export_store(store, "deepspeed", config, record.number)
    told = train_with(record.candidate, store.job, "s", config, store.threads, environment_of(store, record.candidate))
    how, command = told.commands[1]
    variables = {"OBSERVED_CONFIG": str(config)} if how.startswith("or put") else {}
    return shlex.split(command), variables


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """Return the differences of two trainings: weights by the changes of the first, losses by their size."""
    changed = [float((b - a).norm()) for a, b in zip(one["initial"], one["final"], strict=True)]
    apart = [float((b - a).norm()) for a, b in zip(one["final"], other["final"], strict=True)]
    size = statistics.fmean(abs(loss) for loss in one["losses"]) or 1.0
    losses = [abs(a - b) / size for a, b in zip(one["losses"], other["losses"], strict=True)]
    start = [float((b - a).abs().max()) for a, b in zip(one["initial"], other["initial"], strict=True)]
    weights = max(gap / max(moved, 1e-12) for gap, moved in zip(apart, changed, strict=True))
    return {"weights": weights, "loss": statistics.fmean(losses), "start": max(start)}


def _left_out(row: Mapping[str, Any], why: str) -> dict[str, Any]:
    """Return the row of a script of which nothing was compared. The whole reason goes to standard error."""
    print(f"{row['script']}: {why}", file=sys.stderr)
    return {**row, "verdict": textwrap.shorten(why, _MOST_WHY, placeholder=" …")}


def _speed(run: Mapping[str, Any]) -> float:
    """Return samples per second, by the median step after the first five."""
    seconds = [b - a for a, b in zip(run["at"][5:], run["at"][6:], strict=False)]
    return float(statistics.median(run["rows"]) / statistics.median(seconds))


def _compared(name: str, folder: Path, budget: str, trials: int, most: int) -> list[dict[str, Any]]:
    style = STYLES[name]
    row: dict[str, Any] = {"script": name, "style": style.what}
    _prepared(name, folder)
    store = _tuned(name, folder, budget, trials)
    if isinstance(store, str):
        return [_left_out(row, store)]
    assert store.job.script is not None
    own, followed = own_candidate(store.job.script), _followed(store, most)
    if not followed:
        note = store.job.script.profile.batch_note
        return [_left_out(row, f"no other config was measured{f' ({note})' if note else ''}")]
    printed, _ = _command(store, followed[0], folder, "own")
    words = _launched(printed, shlex.split(style.command))
    yours = _trained(words, folder, "own")
    if isinstance(yours, str):
        return [_left_out(row, f"the script's own command: {yours}")]

    @functools.cache
    def floor() -> Mapping[str, float]:
        again = _trained(words, folder, "again", OBSERVED_SEED="99", OMP_NUM_THREADS="2")
        if isinstance(again, str):
            raise RuntimeError(f"the script's own command ran once and not twice: {again}")
        return difference(yours, again)

    rows = []
    for record in followed:
        command, variables = _command(store, record, folder, f"trial{record.number}")
        theirs = _trained(command, folder, f"trial{record.number}", **variables)
        role = "winner" if store.winner is not None and record.candidate == store.winner.candidate else "runner-up"
        differs = ", ".join(_differences(record.candidate, own))
        rows.append({**row, "role": role, "differs in": differs, "command": shlex.join(command)})
        if isinstance(theirs, str):
            rows[-1]["verdict"] = theirs
            continue
        found = difference(yours, theirs)
        answer = verdict(yours, theirs, found, floor, store.job.precision)
        needed = floor() if floor.cache_info().currsize else {}
        rows[-1] |= {
            "speed": _speed(theirs) / _speed(yours),
            "rows a step": f"{statistics.median(yours['rows']):g} / {statistics.median(theirs['rows']):g}",
            "stages": f"{yours['stage']} / {theirs['stage']}",
            "micro-batches": f"{yours['micro_batches'][0]} / {theirs['micro_batches'][0]}",
            "loss": f"{yours['losses'][-1]:.5g} / {theirs['losses'][-1]:.5g}",
            "loss difference": found["loss"],
            "loss floor": needed.get("loss"),
            "weights difference": found["weights"],
            "weights floor": needed.get("weights"),
            "verdict": answer,
        }
    return rows


def verdict(
    yours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    found: Mapping[str, float],
    floor: Callable[[], Mapping[str, float]],
    kind: str,
) -> str:
    """Return the verdict in words; the floor is measured only if rounding does not explain a difference."""
    least = LEAST.get(kind, LEAST["bf16"])
    if yours["rows"] != theirs["rows"]:
        return "DIFFERS: rows of a step"
    if found["start"] > 1e-6:
        return "DIFFERS: initial weights"
    beyond = [key for key in ("weights", "loss") if found[key] > least]
    if not beyond:
        return "trains the same"
    noise = {key: FLOORS * floor()[key] for key in beyond}
    beyond = [key for key in beyond if found[key] > noise[key]]
    if beyond:
        return f"DIFFERS: {' and '.join(beyond)}"
    return "the same within its noise" if max(noise.values()) <= SHOWN else "not shown: its noise is as large"


# -- command line ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--only", help="scripts, separated by commas")
    parser.add_argument("--budget", default="100s", help="of each `autotune run`")
    parser.add_argument("--trials", type=int, default=5, help="of each `autotune run`")
    parser.add_argument("--most", type=int, default=2, help="configs of each script that are trained")
    parser.add_argument("--keep", type=Path, help="folder in which studies and logs stay")
    arguments = parse(parser, only="all_ranks", trials=2, most=1)
    chosen = arguments.only.split(",") if arguments.only else list(STYLES)
    rows: list[dict[str, Any]] = []
    for name in chosen:
        needs = STYLES[name].needs
        if needs and subprocess.run([sys.executable, "-c", f"import {needs}"], capture_output=True).returncode:
            rows.append({"script": name, "style": STYLES[name].what, "verdict": f"not run: no {needs} here"})
            continue
        with tempfile.TemporaryDirectory() as made:
            folder = arguments.keep / name if arguments.keep else Path(made)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            rows += _compared(name, folder, arguments.budget, arguments.trials, arguments.most)
        for row in rows:
            if row["script"] == name:
                print(row, flush=True)
        whole = [*kept_rows(arguments.json, "script", chosen), *rows]
        write_json(arguments.json, whole)
    columns = ("script", "role", "differs in", "speed", "rows a step", "micro-batches", "stages")
    print_table("what was trained", [{key: row.get(key) for key in columns} for row in rows])
    trained = (
        "script",
        "role",
        "loss",
        "loss difference",
        "loss floor",
        "weights difference",
        "weights floor",
        "verdict",
    )
    print_table(f"after {STEPS} optimizer steps", [{key: row.get(key) for key in trained} for row in rows], keys=2)
    if any("DIFFERS" in row["verdict"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

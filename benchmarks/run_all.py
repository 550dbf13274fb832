"""Writes every file of benchmarks/results anew, one command after another: `make benchmarks`, which takes hours.

`python benchmarks/run_all.py [NAME…]` writes only these. `--small` runs the small forms, whose
results go to a temporary folder. A command that fails does not stop the others; the last line says which failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.common import HERE, RESULTS

OWN = str(HERE / "data" / "landscapes_own")
REAL = str(HERE / "data" / "landscapes_real")
SHARED = str(HERE / "data" / "landscapes")
WRONG = (
    "autotune,inverted,constant,drawn,wrong-time,wrong-memory,adversarial,misled-1,misled-2,misled-3,misled-4,misled-5"
)

# Name of the result -> the command and its options. The first writes what the second reads.
FULL: dict[str, list[str]] = {
    "live_tensors_cpu": ["predict/live_tensors.py"],
    "live_tensors_images_cpu": ["predict/live_tensors.py", "--images"],
    "live_tensors_keys_cpu": ["predict/live_tensors.py", "--own-keys"],
    "live_tensors_knobs_cpu": ["predict/live_tensors.py", "--knobs"],
    "live_tensors_lora_cpu": ["predict/live_tensors.py", "--lora"],
    "live_tensors_muon_cpu": ["predict/live_tensors.py", "--muon"],
    "live_tensors_loss_cpu": ["predict/live_tensors.py", "--loss"],
    "predictor": ["predict/predictor.py"],
    "predictor-rows12": [
        "predict/predictor.py",
        "--skip",
        "live,traces,published,speed",
        "--rows",
        "12",
        "--seeds",
        "10",
    ],
    "published": ["predict/published.py"],
    "published-jobs": ["predict/published.py", "--table", "qlora_and_muon", "--table", "sequences"],
    "cpu-ranks": ["predict/cpu_ranks.py"],
    "search": ["search/search.py"],
    "search-own": [
        "search/search.py",
        "--landscapes",
        OWN,
        "--seeds",
        "10",
        "--strategies",
        "autotune,tpe,random,adversarial",
    ],
    "search-real": ["search/search.py", "--landscapes", REAL, "--seeds", "10", "--left-out"],
    "search-wrong": [
        "search/search.py",
        "--landscapes",
        SHARED,
        OWN,
        "--until-found",
        "--seeds",
        "1",
        "--budget",
        "60m",
        "--strategies",
        WRONG,
    ],
    "search-spaces": ["search/spaces.py"],
    "proposer": ["search/proposer.py"],
    "first-step-cpu": ["trials/first_step.py"],
    "real-tables": ["search/real_tables.py"],
    "variants-cpu": ["trials/job_variants.py"],
    "fidelity-cpu": ["trials/fidelity.py"],
    "frameworks-cpu": ["trials/frameworks.py"],
    "recovery-cpu": ["reliability/recovery.py"],
    "vs-deepspeed-cpu": ["search/vs_deepspeed.py"],
    "nodes": ["cluster/nodes.py"],
    "reliability-kills": ["reliability/kills.py"],
}
# The small form of each command, by the full result that it has the shape of.
SMALL: dict[str, list[str]] = {
    name: [command, "--small"]
    for command, name in {options[0]: name for name, options in reversed(FULL.items())}.items()
}
# Of what is not in results/. Older DeepSpeeds' beside them come from environments with these (docs/versions.md):
# `python benchmarks/predict/live_tensors.py --only tiny-llama,2,bf16 --json FILE`, FILE
# `benchmarks/data/live_tensors_deepspeed-VERSION_cpu.json`.
PLACES = {name: HERE / "data" for name in FULL if name.startswith("live_tensors")}
# Files that have no result here, and why.
EXEMPT = {
    "common.py": "imported: the command line, tables, JSON files",
    "trials/ranks.py": "imported: executor, supervisor, torchrun",
    "search/table_ranks.py": "started by real_tables.py: ranks of plain trainings",
    "trials/inturn.py": "imported by frameworks.py, recovery.py and vs_deepspeed.py: trainings that take turns",
    "trials/framework_environments.py": "makes the frameworks' environments: `make test-frameworks`, frameworks.py",
    "trials/framework_commands.py": "imported by frameworks.py: the commands, and the files that they name",
    "trials/framework_inputs.py": "started by frameworks.py in a framework's environment: model, tokenizer, data",
    "predict/live_error.py": "imported by predictor.py and live_tensors.py: predictions beside what was counted",
    "reliability/planting.py": "imported by faults.py: faults of a study's trials",
    "reliability/__init__.py": "makes the folder a package",
    "reliability/study_calls.py": "imported by stricken.py and reliability/: calls of `autotune run`",
    "reliability/stricken.py": "imported by faults.py: calls and trainings that are killed",
    "reliability/fault_ground.py": "imported by faults.py: where faults are planted, and what is left",
    "training/plainly/sitecustomize.py": "started by winners.py in each training: notes losses and weights",
    "trials/timed.py": "started by inturn.py around a training script",
    "trials/train_plain.py": "started by ranks.py under torchrun",
    "predict/many_traces.py": "imported: traces for many jobs at once",
    "predict/caching_allocator.py": "imported by tests: the allocator's rules, which batches of many lengths are held against",
    "run_all.py": "this file",
    "predict/shipped_traces.py": "writes autotune/data/traces.json; with --time, seconds of a plan",
    "docs/figures.py": "writes documents from results; measures nothing",
    "docs/stages.py": "imported by docs/figures.py: tables of the ZeRO stages",
    "cluster/node_grounds.py": "imported by nodes.py: nodes over ssh, Slurm and Ray, and what is killed there",
    "search/replay.py": "imported: an executor whose trials come from a recorded table",
    "search/record.py": "imported by tests: writes a study as a table",
    "search/baselines.py": "imported by search.py: what other tuners do",
    "search/parts.py": "imported by search.py: predictors and proposers in place of ours",
    "predict/throughputs.py": "imported by predictor.py: against published throughputs",
    "predict/rows.py": "imported by predictor.py and fidelity.py: a measure beside its target",
    "docs/search.py": "imported by docs/figures.py: figures of searches",
    "docs/writing.py": "imported by docs/figures.py: how a figure is written",
    "gpu/gpu_acceptance.py": "`make gpu-acceptance`: names its results for the GPU; tests of its own rehearse it",
}
# Commands that ask whether the code can be trusted, and go on where they stopped: `make flakes`, `mutants`, `faults`, `planted`,
# `winners`.
OF_THE_TESTS = (
    "reliability/flakes.py",
    "reliability/mutants.py",
    "reliability/faults.py",
    "training/planted.py",
    "training/winners.py",
)


def result_path(name: str) -> Path:
    return PLACES.get(name, RESULTS) / f"{name}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FULL)}")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    commands = SMALL if arguments.small else FULL
    if unknown := set(arguments.names) - set(commands):
        parser.error(f"no result {', '.join(sorted(unknown))}; expected some of {', '.join(commands)}")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.names or commands:
            path = Path(folder) / f"{name}.json" if arguments.small else result_path(name)
            script, *options = commands[name]
            print(f"== {name}: {script} {' '.join(options)}", flush=True)
            began = time.monotonic()
            code = subprocess.run([sys.executable, str(HERE / script), *options, "--json", str(path)]).returncode
            print(f"== {name}: exit {code} after {time.monotonic() - began:.0f} s", flush=True)
            if code:
                failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
    print("all written; `python benchmarks/docs/figures.py --write` takes them into the documents")


if __name__ == "__main__":
    main()

"""Writes every file of benchmarks/results anew, one command after another: `make benchmarks`, which takes hours.

`python benchmarks/run_all.py [NAME…]` writes only these. `--small` (`make benchmarks-small`) runs the small forms, whose
results go to a temporary folder. A command that fails does not stop the others; the last line says which failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import HERE, RESULTS

OWN = str(HERE / "data" / "landscapes_own")
REAL = str(HERE / "data" / "landscapes_real")
SHARED = str(HERE / "data" / "landscapes")
ABLATIONS = "autotune,no-predictor,no-ladder,no-dominance,no-sampler"
WRONG = (
    "autotune,inverted,constant,drawn,wrong-time,wrong-memory,adversarial,misled-1,misled-2,misled-3,misled-4,misled-5"
)

# Name of the result -> the command and its options. The first writes what the second reads.
FULL: dict[str, list[str]] = {
    "live_tensors_cpu": ["live_tensors.py"],
    "live_tensors_keys_cpu": ["live_tensors.py", "--own-keys"],
    "live_tensors_knobs_cpu": ["live_tensors.py", "--knobs"],
    "live_tensors_lora_cpu": ["live_tensors.py", "--lora"],
    "predictor": ["predictor.py"],
    "predictor-rows12": ["predictor.py", "--skip", "live,traces,published,speed", "--rows", "12", "--seeds", "10"],
    "published": ["published.py"],
    "allocator": ["allocator.py"],
    "cpu-ranks": ["cpu_ranks.py"],
    "search": ["search.py"],
    "search-own": [
        "search.py",
        "--landscapes",
        OWN,
        "--seeds",
        "10",
        "--strategies",
        "autotune,tpe,random,adversarial",
    ],
    "search-real": ["search.py", "--landscapes", REAL, "--seeds", "10"],
    "search-ablation": ["search.py", "--seeds", "3", "--strategies", ABLATIONS],
    "search-wrong": [
        "search.py",
        "--landscapes",
        SHARED,
        OWN,
        "--until-found",
        "--seeds",
        "3",
        "--budget",
        "60m",
        "--strategies",
        WRONG,
    ],
    "search-spaces": ["spaces.py"],
    "proposer": ["proposer.py"],
    "first-step-cpu": ["first_step.py"],
    "real-tables": ["real_tables.py"],
    "gallery-starts": ["gallery_starts.py"],
    "gallery-constants": ["gallery_constants.py"],
    "report": ["report.py"],
    "storage": ["storage.py"],
    "trials-cpu": ["trials.py"],
    "preload-cpu": ["preload.py"],
    "fidelity-cpu": ["fidelity.py"],
    "scripts-cpu": ["scripts.py"],
    "frameworks-cpu": ["frameworks.py"],
    "recovery-cpu": ["recovery.py"],
    "vs-deepspeed-cpu": ["vs_deepspeed.py"],
    "parallel-cpu": ["parallel.py"],
    "nodes": ["nodes.py"],
    "reliability-large": ["reliability/large.py"],
    "reliability-growth": ["reliability/growth.py"],
    "reliability-kills": ["reliability/kills.py"],
    "reliability-conditions": ["reliability/conditions.py"],
    "sandbox": ["sandbox.py"],
}
# The small form of each command, by the full result that it has the shape of.
SMALL: dict[str, list[str]] = {
    name: [command, "--small"]
    for command, name in {options[0]: name for name, options in reversed(FULL.items())}.items()
}
# Of what is not in results/. Older DeepSpeeds' beside them come from environments with these (docs/versions.md):
# `python benchmarks/live_tensors.py --only tiny-llama,2,bf16 --json benchmarks/data/live_tensors_deepspeed-VERSION_cpu.json`.
PLACES = {name: HERE / "data" for name in FULL if name.startswith("live_tensors")}
# Files that have no result here, and why.
EXEMPT = {
    "gallery_entries.py": "writes gallery/entries, which tests check",
    "common.py": "imported: the command line, tables, JSON files",
    "ranks.py": "imported: executor, supervisor, torchrun",
    "table_ranks.py": "started by real_tables.py: ranks of plain trainings",
    "inturn.py": "imported by scripts.py, recovery.py and vs_deepspeed.py, which start it as one side of a comparison",
    "framework_environments.py": "makes the frameworks' environments: `make test-frameworks`, frameworks.py",
    "framework_commands.py": "imported by frameworks.py: the commands, and the files that they name",
    "framework_inputs.py": "started by frameworks.py in a framework's environment: model, tokenizer, data",
    "live_error.py": "imported by predictor.py and live_tensors.py: predictions beside what was counted",
    "planting.py": "imported by faults.py: faults of a study's trials",
    "reliability/__init__.py": "makes the folder a package",
    "reliability/large_study.py": "imported by reliability/large.py and growth.py: a study of many trials, and its table",
    "study_calls.py": "imported by stricken.py and reliability/: calls of `autotune run`",
    "stricken.py": "imported by faults.py: calls and trainings that are killed",
    "fault_ground.py": "imported by faults.py: where faults are planted, and what is left",
    "published_decisions.py": "imported by published.py: what a source states without a number",
    "published_gpus.py": "imported by published.py: GPUs by the names that people publish them under",
    "published_numbers.py": "imported by published.py: numbers as people print them",
    "published_optimizers.py": "imported by published.py: optimizers by their published names",
    "published_parallel.py": "imported by published.py: stages and offloading by their published names",
    "published_precision.py": "imported by published.py: the types of weights and arithmetic",
    "published_words.py": "imported by published.py: the vocabulary of each column",
    "published_lora.py": "imported by published.py: adapters as people write them",
    "published_models.py": "imported by published.py: models by the names that people publish them under",
    "published_readers.py": "imported by published.py: a row as Job, Hardware and Candidate",
    "published_rows.py": "imported by published.py: a table's rows, units and kinds of figures",
    "published_scores.py": "imported by published.py: predictions beside what was measured",
    "published_sources.py": "imported by published.py: what each source says beyond the columns",
    "timed.py": "started by inturn.py around a training script",
    "train_plain.py": "started by ranks.py under torchrun",
    "deepspeed_train.py": "started by DeepSpeed's autotuner in gpu/deepspeed.py",
    "caching_allocator.py": "imported by allocator.py",
    "run_all.py": "this file",
    "published_error.py": "writes autotune/data/predictor_error.json from published.json; measures nothing",
    "docs_figures.py": "writes documents from results; measures nothing",
    "docs_stages.py": "imported by docs_figures.py: tables of the ZeRO stages",
    "node_grounds.py": "imported by nodes.py: nodes over ssh, Slurm and Ray, and what is killed there",
    "search_baselines.py": "imported by search.py: what other tuners do",
    "search_parts.py": "imported by search.py: predictors and proposers in place of ours",
    "predictor_published.py": "imported by predictor.py: against published throughputs",
    "predictor_rows.py": "imported by predictor.py and fidelity.py: a measure beside its target",
    "docs_search.py": "imported by docs_figures.py: figures of searches",
    "docs_writing.py": "imported by docs_figures.py: how a figure is written",
    "gpu_acceptance.py": "`make gpu-acceptance`: names its results for the GPU; tests of its own rehearse it",
}
# Commands that ask whether the code can be trusted, and go on where they were stopped: `make flakes`, `mutants`, `faults`.
OF_THE_TESTS = ("flakes.py", "mutants.py", "faults.py")


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
    print("all written; `python benchmarks/docs_figures.py --write` takes them into the documents")


if __name__ == "__main__":
    main()

"""Tunes from Python, goes on with the study in a second call, and exports what was found.

python tune.py                                        on this machine's GPUs
python tune.py --model tiny-llama --device cpu --gpus 2 --budget 1m   without one, to see it work
"""

from __future__ import annotations

import argparse

import autotune


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma-2-2b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--budget", default="15m")
    parser.add_argument("--space", default="default")
    parser.add_argument("--max-trials", type=int, help="of each of the two calls")
    job = vars(parser.parse_args())

    first = autotune.tune(study="from-python", **job)
    print(f"after {first.used_seconds:.0f} s: {first.winner.candidate if first.winner else 'nothing yet'}")

    # A call with the same job and name resumes the study: in another process, on another day, after a crash.
    second = autotune.tune(study="from-python", seed=1, **job)
    print("\n".join(second.lines))

    study = autotune.open_study("from-python")
    for trial in study.records():
        kind = trial.outcome.kind.value if trial.outcome else "running"
        print(f"{trial.number:3} {trial.candidate}: {kind}")
    for style in ("deepspeed", "accelerate", "hf"):
        for file in autotune.export_study("from-python", style=style):
            print(f"wrote {file}")


if __name__ == "__main__":
    main()

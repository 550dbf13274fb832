"""Everything that only a GPU can prove, in one call: `make gpu-acceptance`. Writes benchmarks/results/gpu-NAME.json.

The GPU tests; `doctor`; gemma-2-2b tuned under caps of 16, 24 and 40 GiB, with trials a minute and the gain over
DeepSpeed's defaults at the largest micro-batch that fits; and the fidelity of the 24 GiB winner.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import print_table, write_json

from autotune.errors import UserError
from autotune.problem.hardware import detect

HERE = Path(__file__).parent


def call(*words: str) -> tuple[int, str, float]:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    sys.stderr.write(done.stderr[-4000:])
    return done.returncode, done.stdout, time.monotonic() - began


def tune(model: str, cap: str, budget: str, study: str, *more: str) -> dict[str, Any]:
    code, out, seconds = call(
        "autotune.cli",
        "run",
        "--model",
        model,
        "--gpus",
        "1",
        "--memory-cap",
        cap,
        "--budget",
        budget,
        "--study",
        study,
        "--yes",
        "--json",
        *more,
    )
    found: dict[str, Any] = {"model": model, "cap": cap, "exit": code, "seconds": seconds}
    if code == 0:
        report = json.loads(out)
        code, shown, _ = call("autotune.cli", "show", study, "--json")
        trials = json.loads(shown)["trials"] if code == 0 else []
        found |= {
            "winner": report["winner"],
            "verified": report["verified"],
            "trials": len(trials),
            "trials_per_minute": 60 * len(trials) / seconds,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gemma-2-2b")
    parser.add_argument("--caps", default="16GiB,24GiB,40GiB")
    parser.add_argument("--budget", default="5m")
    arguments = parser.parse_args()
    try:
        hardware = detect("cuda", 1)
    except UserError as error:
        raise SystemExit(f"no GPU to prove anything on: {error}") from None
    result: dict[str, Any] = {"hardware": str(hardware)}
    code, out, seconds = call("pytest", "-m", "gpu", "-q", "tests/gpu")
    result["gpu tests"] = {"exit": code, "summary": out.strip().splitlines()[-1:], "seconds": seconds}
    code, out, _ = call("autotune.cli", "doctor", "--json")
    result["doctor"] = json.loads(out) if out.strip().startswith(("{", "[")) else out
    stamp = time.strftime("%Y%m%d-%H%M%S")
    rows = []
    for cap in arguments.caps.split(","):
        tuned = tune(arguments.model, cap, arguments.budget, f"gpu-{cap}-{stamp}")
        defaults = tune(
            arguments.model,
            cap,
            arguments.budget,
            f"gpu-{cap}-{stamp}-defaults",
            "--space",
            str(HERE / "deepspeed_defaults.yaml"),
        )
        for one in (tuned, defaults):
            one["samples_per_second"] = (
                (one.get("winner") or {}).get("outcome", {}).get("measurement", {}).get("samples_per_second")
            )
        rates = tuned["samples_per_second"], defaults["samples_per_second"]
        tuned["gain over DeepSpeed's defaults"] = rates[0] / rates[1] if rates[0] and rates[1] else None
        rows += [tuned, {**defaults, "model": f"{arguments.model}, DeepSpeed's defaults"}]
    result["tuned"] = rows
    name = hardware.name.lower().replace(" ", "-")
    fidelity = HERE / "results" / f"fidelity-{name}.json"
    study = f"gpu-{arguments.caps.split(',')[-1]}-{stamp}"
    done = subprocess.run([sys.executable, str(HERE / "fidelity.py"), study, "--json", str(fidelity)], text=True)
    result["fidelity"] = json.loads(fidelity.read_text()) if done.returncode == 0 else {"exit": done.returncode}
    print_table(f"gpu acceptance on {hardware}", [{k: str(v)[:60] for k, v in row.items()} for row in rows[:1]])
    write_json(HERE / "results" / f"gpu-{name}.json", result)


if __name__ == "__main__":
    main()

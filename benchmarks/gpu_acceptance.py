"""Everything that only a GPU can prove, in one call: `make gpu-acceptance`. Writes benchmarks/results/gpu-NAME.json.

The GPU tests; `doctor`; gemma-2-2b tuned under caps of 16, 24 and 40 GiB, with trials a minute and the gain over
DeepSpeed's defaults at the largest micro-batch that fits; and the fidelity of the last winner. Without a GPU it says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import HERE, RESULTS, command_line, parse, print_table, write_json
from ranks import autotune_run

from autotune.errors import UserError
from autotune.problem.hardware import Hardware, detect

DEFAULTS = ("--space", str(HERE / "deepspeed_defaults.yaml"))


def call(*words: str) -> tuple[int, str, float]:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    sys.stderr.write(done.stderr[-4000:])
    return done.returncode, done.stdout, time.monotonic() - began


def tune(model: str, cap: str, budget: str, study: str, *more: str) -> dict[str, Any]:
    began = time.monotonic()
    options = ["--model", model, "--gpus", "1", "--memory-cap", cap, "--budget", budget, "--study", study, *more]
    done = autotune_run(*options)
    seconds = time.monotonic() - began
    found: dict[str, Any] = {"model": model, "cap": cap, "exit": done.code, "seconds": seconds}
    if done.code:
        sys.stderr.write(done.stderr[-4000:])
        return found
    code, shown, _ = call("autotune.cli", "show", study, "--json")
    trials = json.loads(shown)["trials"] if code == 0 else []
    winner = done.report["winner"]
    measurement = winner.get("outcome", {}).get("measurement") or {}
    return found | {
        "winner": winner,
        "verified": done.report["verified"],
        "trials": len(trials),
        "trials_per_minute": 60 * len(trials) / seconds,
        "samples_per_second": measurement.get("samples_per_second"),
    }


def tuned_under_caps(arguments: argparse.Namespace, stamp: str) -> list[dict[str, Any]]:
    """Each cap: the whole space, and DeepSpeed's defaults."""
    rows = []
    for cap in arguments.caps.split(","):
        study = f"gpu-{cap}-{stamp}"
        tuned = tune(arguments.model, cap, arguments.budget, study)
        defaults = tune(arguments.model, cap, arguments.budget, f"{study}-defaults", *DEFAULTS)
        ours, theirs = tuned.get("samples_per_second"), defaults.get("samples_per_second")
        tuned["gain over DeepSpeed's defaults"] = ours / theirs if ours and theirs else None
        rows += [tuned, {**defaults, "model": f"{arguments.model}, DeepSpeed's defaults"}]
    return rows


def fidelity(study: str, into: Path | None, small: bool) -> dict[str, Any]:
    """What training reaches of the study's winner, also written to `into`."""
    with tempfile.TemporaryDirectory() as folder:
        path = into or Path(folder) / "fidelity.json"
        words = [str(HERE / "fidelity.py"), study, "--json", str(path), *(["--small"] if small else [])]
        done = subprocess.run([sys.executable, *words])
        return dict(json.loads(path.read_text())) if done.returncode == 0 else {"exit": done.returncode}


def accept(arguments: argparse.Namespace, hardware: Hardware, name: str) -> dict[str, Any]:
    result: dict[str, Any] = {"hardware": str(hardware)}
    if not arguments.small:
        code, out, seconds = call("pytest", "-m", "gpu", "-q", "tests/gpu")
        result["gpu tests"] = {"exit": code, "summary": out.strip().splitlines()[-1:], "seconds": seconds}
    code, out, _ = call("autotune.cli", "doctor", "--json")
    result["doctor"] = json.loads(out) if out.strip().startswith(("{", "[")) else out
    stamp = time.strftime("%Y%m%d-%H%M%S")
    result["tuned"] = tuned_under_caps(arguments, stamp)
    into = None if arguments.small else RESULTS / f"fidelity-{name}.json"
    result["fidelity"] = fidelity(f"gpu-{arguments.caps.split(',')[-1]}-{stamp}", into, arguments.small)
    return result


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="gemma-2-2b")
    parser.add_argument("--caps", default="16GiB,24GiB,40GiB")
    parser.add_argument("--budget", default="5m")
    arguments = parse(parser, model="tiny-llama", caps="8GiB", budget="45s")
    try:
        hardware = detect("cuda", 1)
    except UserError as error:
        print(f"no GPU to prove anything on: {error}")
        raise SystemExit(0 if arguments.small else 1) from None
    name = hardware.name.lower().replace(" ", "-")
    result = accept(arguments, hardware, name)
    rows = [{key: value for key, value in row.items() if key != "winner"} for row in result["tuned"]]
    print_table(f"gpu acceptance on {hardware}", rows, keys=2)
    path = RESULTS / f"gpu-{name}.json"
    write_json(arguments.json if arguments.small or arguments.json else path, result)


if __name__ == "__main__":
    main()

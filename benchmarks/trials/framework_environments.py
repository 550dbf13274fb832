"""Environments of the frameworks that people fine-tune with, each made from its file of pins in `environments/`.

`python benchmarks/trials/framework_environments.py [NAME…] [--environments DIR]` makes those that are missing or whose pins have
changed since. torch comes first, by its exact version, and then everything without its own requirements: these would pull another
build of torch, of several gigabytes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.workers.jit_ops import FOLDER, own_folder
from benchmarks.common import HERE

ROOT = HERE.parent
PINS = ROOT / "environments"
FRAMEWORKS = ("llamafactory", "axolotl", "ms-swift", "trl")
DEFAULT = ROOT / ".venvs"
# What building a source distribution imports: DeepSpeed's reads torch and these.
_BUILDERS: tuple[str, ...] = ("setuptools", "wheel", "packaging", "ninja", "numpy", "psutil", "py-cpuinfo", "pydantic")
_BUILDERS += ("pydantic_core", "annotated-types", "typing-inspection", "hjson", "msgpack", "einops", "tqdm")
_TORCH = "torch"


def python_of(name: str, folder: Path) -> Path | None:
    """The interpreter of an environment; None where it is not made, or was made from other pins or by another checkout."""
    python = folder / name / "bin" / "python"
    stamp = folder / name / ".pins"
    return python if python.exists() and stamp.exists() and stamp.read_text() == _digest(name) else None


def made(name: str, folder: Path) -> Path:
    """The interpreter of an environment, which is made where it is missing.

    Raises:
        SystemExit: pip failed; with its last lines.
    """
    if found := python_of(name, folder):
        return found
    home = folder / name
    print(f"making {home} from environments/{name}.txt", file=sys.stderr, flush=True)
    _run([sys.executable, "-m", "venv", str(home)])
    python = home / "bin" / "python"
    pins = {line.partition("==")[0]: line for line in _lines(name)}
    first = [pins[one] for one in (_TORCH,)]
    _pip(python, first)
    lower = {key.lower().replace("_", "-"): line for key, line in pins.items()}
    builders = [lower[key] for one in _BUILDERS if (key := one.replace("_", "-")) in lower]
    _pip(python, ["--no-deps", *builders])
    _pip(python, ["--no-deps", "--no-build-isolation", "-r", str(PINS / f"{name}.txt")])
    _pip(python, ["--no-deps", "--no-build-isolation", "-e", str(ROOT)])
    _without_cuda_libraries(python)
    (home / ".pins").write_text(_digest(name))
    return python


def environment(python: Path) -> dict[str, str]:
    """Variables of whatever runs there: its programs first, and a cache of DeepSpeed's built ops of its own; in this process's
    own environment the one that trials here use."""
    home = python.parent.parent
    ops = own_folder("cpu") if home == Path(sys.prefix) else home / "torch_extensions"
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    return {
        **inherited,
        "VIRTUAL_ENV": str(home),
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        FOLDER: str(ops),
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
    }


def _lines(name: str) -> list[str]:
    text = (PINS / f"{name}.txt").read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def _digest(name: str) -> str:
    """Of the pins, and of this checkout: an environment that another one made would run that one's tuner."""
    return hashlib.sha256("\n".join([str(ROOT), *_lines(name)]).encode()).hexdigest()


def _pip(python: Path, words: Sequence[str]) -> None:
    _run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *words])


def _run(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:8])} … failed:\n{done.stderr[-2000:]}")


def _without_cuda_libraries(python: Path) -> None:
    """PyPI has torchaudio for CUDA alone: without its libraries, which a torch for CPUs cannot load, the rest works."""
    asked = "import torch, sysconfig; print(torch.version.cuda or '', sysconfig.get_path('purelib'))"
    done = subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=True)
    cuda, _, packages = done.stdout.strip("\n").rpartition(" ")
    if not cuda.strip():
        for library in (Path(packages) / "torchaudio" / "lib").glob("*.so"):
            library.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FRAMEWORKS)}; default: all")
    parser.add_argument("--environments", type=Path, default=DEFAULT, metavar="DIR")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(FRAMEWORKS):
        parser.error(f"no environment {', '.join(sorted(unknown))}; expected some of {', '.join(FRAMEWORKS)}")
    for name in arguments.names or FRAMEWORKS:
        print(made(name, arguments.environments.absolute()))


if __name__ == "__main__":
    main()

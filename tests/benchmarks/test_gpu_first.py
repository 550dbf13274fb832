"""The first minutes on a GPU machine, as far as they need no ranks: `benchmarks/gpu/rehearse.sh` is all of it, and CI runs that."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.common import HERE
from benchmarks.gpu import image

COMMAND = HERE / "gpu" / "gpu_first.py"


def call(*options: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(COMMAND), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)


def test_an_unknown_step_is_one_line_and_exit_2(tmp_path: Path) -> None:
    done = call("--out", str(tmp_path), "--steps", "facts,lunch", "--rehearse")
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_first.py: --steps facts,lunch: no step lunch; expected some of facts,script,")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_steps_without_time_leave_a_file_that_says_so(tmp_path: Path) -> None:
    """From any folder, and whatever lies there."""
    (tmp_path / "here").mkdir()
    for name in ("ranks.py", "common.py"):
        (tmp_path / "here" / name).write_text("raise SystemExit('the benchmarks import their own')\n")
    out, work = tmp_path / "a folder", tmp_path / "work"
    done = call("--out", str(out), "--work", str(work), "--rehearse", "--seconds", "1", cwd=tmp_path / "here")
    assert done.returncode == 1, done.stderr
    found = json.loads((out / "first.json").read_text())
    assert found["rehearsal"]
    assert list(found["steps"]) == ["facts", "script", "two_ranks", "levers"]
    assert all("not begun: " in step["error"] for step in found["steps"].values())


def test_the_image_has_what_wheels_do_not_bring_and_never_autotune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, target = tmp_path / "own" / "site-packages", tmp_path / "venv" / "lib" / "python3.12" / "site-packages"
    target.mkdir(parents=True)
    entries = ["torch", "torch-2.11.dist-info", "deepspeed", "deepspeed-0.19.8.dist-info", "Mako-1.3.dist-info"]
    entries += ["autotune", "deepspeed_autotune-0.2.0.dist-info", "__editable__.deepspeed_autotune-0.2.0.pth", "x.pth"]
    for entry in entries:
        (packages / entry).mkdir(parents=True)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for wheel, names in {
        "deepspeed-0.19.9": ["deepspeed/__init__.py", "deepspeed-0.19.9.dist-info/METADATA"],
        "mako-1.4": ["mako/__init__.py", "mako-1.4.dist-info/METADATA"],
    }.items():
        with zipfile.ZipFile(wheels / f"{wheel}-py3-none-any.whl", "w") as archive:
            for name in names:
                archive.writestr(name, "")
    monkeypatch.setattr(sys, "path", [str(packages)])
    image.link(tmp_path / "venv", wheels)
    assert {path.name for path in target.iterdir()} == {"torch", "torch-2.11.dist-info"}

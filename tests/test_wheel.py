"""The package as it is installed, and the tuner beside the environment where ranks run: real environments, real runs."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.compilers import SlowCompiler
from tests.conftest import SCRIPTS
from tests.environments import install_wheel, make_environment
from tests.plain_training import train

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SPACE = "knobs:\n  zero_stage: [0, 1]\n  train_micro_batch_size_per_gpu: [1, 2, 4]\n  gradient_accumulation_steps: [1, 2, 4]\n"
TUNER = [one for one in metadata.requires("deepspeed-autotune") or [] if "extra ==" not in one]  # what it requires
RUN = ("run", "--device", "cpu", "--gpus", "1", "--budget", "8m", "--space", "space.yaml", "--max-trials", "2")
RUN += ("--no-references",)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the wheel and the source distribution, built from what git would give away."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A folder for an environment."""
    return tmp_path / "user"


class Installed:
    """A console script, run from a folder that has nothing to do with it. DeepSpeed's ops are built anew for each environment, by a
    compiler that is done at once: a single rank has nothing to do for them."""

    def __init__(self, folder: Path, scripts: Path) -> None:
        self.folder, self.script = folder, str(scripts / "autotune")
        folder.mkdir(exist_ok=True)
        compiler = SlowCompiler(folder / "compiler", sysconfig.get_path("include"))
        kept = compiler.environment(folder / "home")
        kept = {name: value for name, value in kept.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self.env = {**kept, "TORCH_EXTENSIONS_DIR": str(folder / "ops"), "AUTOTUNE_CACHE": str(folder / "cache")}
        (folder / "space.yaml").write_text(SPACE)

    def __call__(self, *words: str, code: int = 0) -> str:
        """What it printed."""
        done = subprocess.run(
            [self.script, *words], cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=800
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


def test_what_is_in_wheel_and_source(dist: Path, wheel: Path) -> None:
    (source,) = dist.glob("*.tar.gz")
    packed = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(source) as archive:
        given = {name.partition("/")[2] for name in archive.getnames()}
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "autotune"]
    files = set(subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())
    assert {Path(name).suffix for name in files} >= {".py", ".json", ".j2"}
    spaces = {path.name for path in (ROOT / "search_spaces").glob("*.yaml")}
    assert {name for name in files if (ROOT / name).is_file()} - packed & given == set()
    assert {f"autotune/search_spaces/{name}" for name in spaces} <= packed
    assert {f"search_spaces/{name}" for name in spaces} | {"README.md", "LICENSE"} <= given
    assert {name.partition("/")[0].partition("-")[0] for name in packed} == {"autotune", "deepspeed_autotune"}
    assert not [name for name in given if name.startswith(("tests", "benchmarks", "docs/"))]


@pytest.mark.main_path
def test_what_is_published_is_whole(dist: Path) -> None:
    """As PyPI's own checker sees it: the metadata, and a README that it can show."""
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.iterdir())]
    pytest.importorskip("twine")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


@pytest.mark.main_path
def test_in_one_environment(wheel: Path, user: Path, tmp_path: Path) -> None:
    """`pip install deepspeed-autotune` where torch, deepspeed and transformers are."""
    python = make_environment(user, [*TUNER, "torch", "deepspeed", "transformers"])
    autotune = Installed(tmp_path / "elsewhere", install_wheel(python, wheel))
    assert "tiny-gemma-2" in autotune("models")
    assert "low_memory" in autotune("spaces", "list")
    plan = autotune("plan", "--model", "tiny-gemma-2", "--gpu", "rtx3090", "--space", "zero2")
    assert "not traced" not in plan
    found = json.loads(autotune(*RUN, "--model", "tiny-gemma-2", "--study", "s", "--json"))
    assert found["winner"]
    assert found["verified"]


@pytest.fixture(scope="module")
def tuner(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The console scripts' folder of an environment that has the tuner and no torch."""
    return install_wheel(make_environment(tmp_path_factory.mktemp("tuner") / "env", TUNER), wheel)


def test_beside_a_named_model(tuner: Path, user: Path, tmp_path: Path) -> None:
    autotune = Installed(tmp_path / "elsewhere", tuner)
    refused = autotune(*RUN, "--model", "tiny-gemma-2", code=2)
    assert "no torch and no deepspeed and no transformers in autotune's own environment" in refused
    python = str(make_environment(user, ["torch", "deepspeed", "transformers"]))
    said = autotune(*RUN, "--python", python, "--model", "tiny-gemma-2", "--study", "s")
    assert f"ranks run in {python}: torch " in said
    meta = json.loads((tmp_path / "elsewhere/runs/s/s.meta.json").read_text())
    assert "missing" not in meta["fingerprint"]["versions"].values()
    autotune("export", "s", "--format", "hf")
    assert "not traced" not in autotune("plan", "--model", "tiny-gemma-2", "--gpu", "rtx3090", "--python", python)


def test_beside_a_script_without_transformers(tuner: Path, user: Path, tmp_path: Path) -> None:
    autotune = Installed(tmp_path / "elsewhere", tuner)
    python = make_environment(user, ["torch", "deepspeed"])
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 0},
    }
    (autotune.folder / "ds.json").write_text(json.dumps(config))
    script = [str(SCRIPTS / "bare.py"), "--config", "ds.json", "--steps", "60", "--seen", str(tmp_path / "seen")]
    autotune.env["VIRTUAL_ENV"] = str(user)  # active, and the tuner's own has no torch
    said = autotune(*RUN, "--study", "s", "--", *script)
    assert "of the active environment; --python names another" in said
    del autotune.env["VIRTUAL_ENV"]

    def seen() -> dict:
        found = json.loads((tmp_path / "seen").read_text())
        (tmp_path / "seen").unlink()
        return found

    alone = {"python": str(python), "found": [], "found_by_child": "[]", "steps": 3}
    autotune("launch", "s", "--python", str(user), "--", *script, "--steps", "3")
    assert seen() == alone
    (line,) = [line for line in autotune("show", "s").splitlines() if "without autotune: " in line]
    command = line.partition("without autotune: ")[2]
    assert f"{python} -m torch.distributed.run" in command
    train(["sh", "-c", f"{command} --steps 3"], autotune.folder, {"DS_ACCELERATOR": "cpu"}, autotune.env)
    assert seen() == alone

"""The public door: what `import autotune` gives, and what is said of the paths of version 0.1."""

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autotune
from autotune.moved import MOVED, MovedFinder, moved_line

ROOT = Path(__file__).parent.parent
TOP = sorted(name for name in MOVED if name.count(".") == 1)


@pytest.mark.parametrize("name", sorted(MOVED))
def test_an_import_statement_of_an_old_path_says_the_new_one(name: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(name)
    assert str(caught.value) == f"{name} is now {MOVED[name]}"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", TOP)
def test_the_attribute_of_an_old_path_says_the_new_one(name: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"{name} is now ")):
        getattr(autotune, name.removeprefix("autotune."))


@pytest.mark.parametrize("name", TOP)
def test_from_autotune_import_an_old_module_says_the_new_path(name: str) -> None:
    with pytest.raises(ImportError, match=re.escape(f"{name} is now ")):
        exec(f"from autotune import {name.removeprefix('autotune.')}", {})


@pytest.mark.parametrize(
    "statement", ["from autotune.callback import StudyCallback", "from autotune.trial.rank import main"]
)
def test_a_name_imported_from_an_old_path(statement: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"autotune\.recovery\.callback|autotune\.rank \("):
        exec(statement, {})


@pytest.mark.parametrize("old", sorted(MOVED))
def test_every_new_path_is_there(old: str) -> None:
    paths = re.findall(r"autotune(?:\.\w+)+", MOVED[old])
    assert paths
    for path in paths:
        if path.rpartition(".")[2] not in ("launch", "StudyCallback"):
            assert importlib.util.find_spec(path) is not None, path
    for inside in re.findall(r"(autotune\.\w+) \(([^)]*[a-z]+, [^)]*)\)", MOVED[old]):
        package, listed = inside
        for module in re.split(r"[,;] ", listed):
            assert importlib.util.find_spec(f"{package}.{module.split(' is ')[-1]}") is not None, module


def test_other_names_fail_as_they_always_did() -> None:
    assert moved_line("autotune.nowhere") is None
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'autotune\.nowhere'"):
        importlib.import_module("autotune.nowhere")
    with pytest.raises(AttributeError, match="has no attribute 'nowhere'"):
        autotune.nowhere  # noqa: B018
    assert MovedFinder.find_spec("candidate") is None, "only names of this package are in the table"


def test_the_callback_is_public_and_lazy() -> None:
    code = (
        "import sys, autotune\n"
        "heavy = {'torch', 'transformers', 'optuna', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from autotune import StudyCallback, launch\n"
        "from transformers import TrainerCallback\n"
        "assert issubclass(StudyCallback, TrainerCallback)\n"
        "assert StudyCallback.__module__ == 'autotune.recovery.callback'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_version_stands_in_one_place() -> None:
    tomllib = pytest.importorskip("tomllib", reason="of Python 3.11 and later")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "autotune.version.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", autotune.__version__)


def test_launch_takes_the_commands_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.errors import UserError

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print()")
    with pytest.raises(UserError, match="no study 'mine'"):
        autotune.launch(
            "mine", ["train.py"], max_restarts=2, hang_timeout="5m", memory_cap="1GiB", say=lambda text: None
        )
    with pytest.raises(UserError, match="--max-restarts -1"):
        autotune.launch("mine", ["train.py"], max_restarts=-1)
    with pytest.raises(UserError, match="no duration"):
        autotune.launch("mine", ["train.py"], hang_timeout="soon")
    with pytest.raises(UserError, match="no script nowhere"):
        autotune.launch("mine", ["nowhere.py"])
    with pytest.raises(TypeError, match="max_restart"):
        autotune.launch("mine", ["train.py"], max_restart=1)

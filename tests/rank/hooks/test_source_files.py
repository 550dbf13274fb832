"""Which files of the user's own a script uses."""

import asyncio
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import autotune
from autotune.problem.job import ScriptProfile
from autotune.rank.hooks import source_files
from autotune.rank.hooks.base import Context
from autotune.rank.sandbox import Protection, Sandbox

SCRIPT = """
import json, pathlib, own_model_of_mine
open("ds.json").read()
pathlib.Path("conf/model.yaml").read_text()
with open("made.json", "w") as file: file.write("{}")
open("made.json").read()
open(".env").read(), open(".cache/x.json").read()
open("data.txt").read(), open("large.json").read(), open("mine/config.json").read(), open(r"%s/config.json").read()
"""


@pytest.mark.parametrize("protection", [Protection.OVERLAY, Protection.LANDLOCK])
@pytest.mark.parametrize("profile", [{}, {"micro_batch": 1}], ids=["first run", "later"])
def test_modules_and_configs_are_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    context: Callable[..., tuple[Context, object]],
    profile: dict[str, str],
    protection: Protection,
) -> None:
    cwd, scratch, model = tmp_path / "project", tmp_path / "scratch", tmp_path / "model"
    texts = {"ds.json": "{}", "conf/model.yaml": "a: 1", "data.txt": "x", "large.json": " " * (2 << 20)}
    texts |= {
        "train.py": SCRIPT % model,
        "own_model_of_mine.py": "",
        "unused.py": "",
        "mine/config.json": "{}",
        ".env": "A=1",
    }
    for name, text in texts.items():
        (cwd / name).parent.mkdir(parents=True, exist_ok=True)
        (cwd / name).write_text(text)
    (cwd / ".cache").mkdir()
    (cwd / ".cache" / "x.json").write_text("{}")
    model.mkdir()
    (model / "config.json").write_text("{}")
    sandbox = Sandbox(scratch, cwd, protection)
    sandbox.create(tmp_path / "study")
    monkeypatch.chdir(sandbox.script_cwd)
    monkeypatch.syspath_prepend(str(cwd))
    made, _ = context(
        scratch, argv=("train.py", f"--model={model}"), cwd=str(cwd), profile=ScriptProfile.from_json(profile)
    )
    made = Context(made.job, None, made.watcher, "cpu", sandbox.files, True, made.patches, sandbox=sandbox)
    source_files.install(made)
    runpy.run_path(str(cwd / "train.py"))
    found = source_files.found(made)
    del sys.modules["own_model_of_mine"]
    made.patches.close()
    configs = [".env", "conf/model.yaml", "ds.json", "mine/config.json", str(model / "config.json")]
    mine = [one for one in found if not one.startswith("/") or one.startswith(str(tmp_path))]
    assert mine == sorted(["own_model_of_mine.py", "train.py", *([] if profile else configs)])
    package, library = Path(autotune.__file__).parent, Path(asyncio.__file__).parent
    assert not [one for one in found if "site-packages" in one or {package, library} & set((cwd / one).parents)]

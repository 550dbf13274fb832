"""Which variables of the environment a script reads in its probe run, and which a candidate sets."""

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.masking import MASK
from autotune.problem.candidate import MICRO_BATCH
from autotune.problem.job import ScriptProfile
from autotune.rank.hooks import environment, source_files
from autotune.rank.hooks.base import Context
from tests.conftest import make_candidate
from tests.documents import ROOT

SCRIPT = """
import os
from os import environ, getenv
import argparse, settings_of_mine, library_of_theirs

batch = int(os.environ.get("BATCH_SIZE", 8))
steps = getenv("GRAD_ACC", "4")
stage = os.environ["ZERO_STAGE"]
resumes = "RESUME" in environ
rate = environ.get(key="LR", default=None)
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=os.environ.get("EPOCHS", 3))
token = os.getenv("HF_TOKEN")
library_of_theirs.number("WARMUP")
copies = [os.environ.copy(), dict(os.environ), {**os.environ}, [*os.environ.items()]]
for name in os.environ:
    os.environ[name]
os.environ["SET_BY_SCRIPT"] = "1"
os.environ["SET_BY_SCRIPT"]
"""
LIBRARY = (
    "import os\ndef number(name):\n    return int(os.environ.get(name, 0))\nos.environ.get('OF_THE' + '_LIBRARY')\n"
)


def test_reads_of_the_users_code_are_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: Callable[..., tuple[Context, object]]
) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "library_of_theirs.py").write_text(LIBRARY)
    (tmp_path / "settings_of_mine.py").write_text("import os\nwidth = os.environ.get('WIDTH', '64')\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    others = [folder for folder in sys.path if folder not in ("", str(ROOT))]  # the tests are no code of a user's
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(site), *others])
    values = {
        "BATCH_SIZE": "2",
        "ZERO_STAGE": "2",
        "EPOCHS": "5",
        "HF_TOKEN": "secret-of-mine",
        "UNREAD": "9",
        "WARMUP": "10",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    unset = dict.fromkeys(("GRAD_ACC", "RESUME", "LR", "WIDTH", "SET_BY_SCRIPT"))
    for name in unset:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    made, _ = context(argv=("train.py",), cwd=str(tmp_path))
    environment.install(made)
    try:
        runpy.run_path("train.py")
    finally:
        os.environ.pop("SET_BY_SCRIPT", None)
        found, integers = environment.found(made, source_files.found(made))
        for module in ("settings_of_mine", "library_of_theirs"):
            del sys.modules[module]
    del values["UNREAD"]
    assert found == {**values, "HF_TOKEN": MASK, **unset}
    of_script = {"$GRAD_ACC": 4, "$WIDTH": 64, "$SET_BY_SCRIPT": 1}
    assert integers == {"$BATCH_SIZE": 2, "$ZERO_STAGE": 2, "$EPOCHS": 5, "$WARMUP": 10, **of_script}


def test_a_candidate_sets_the_variable_that_carries_its_batch(
    monkeypatch: pytest.MonkeyPatch, context: Callable[..., tuple[Context, object]]
) -> None:
    monkeypatch.setenv("BATCH_SIZE", "2")
    flags = ((MICRO_BATCH, "$BATCH_SIZE"),)
    made, _ = context(make_candidate(1, 8, 1), flags=flags, profile=ScriptProfile(micro_batch=1))
    environment.install(made)
    assert os.environ["BATCH_SIZE"] == "8"
    assert not made.variables
    made.patches.close()
    assert os.environ["BATCH_SIZE"] == "2"
    made, _ = context(profile=ScriptProfile(tried_values={"$BATCH_SIZE": 4, "train.batch": 3}))
    environment.install(made)
    assert os.environ["BATCH_SIZE"] == "4"

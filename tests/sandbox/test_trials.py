"""A dozen of the ways in a real trial of a DeepSpeed script, through the executor."""

from __future__ import annotations

import json
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.commands.script_probe import probe
from autotune.problem.job import Script
from autotune.script.profile import unknown_job
from tests.conftest import Scripts, make_candidate
from tests.sandbox.runner import make_tree, tree_of
from tests.sandbox.ways import WAYS
from tests.test_scripts import CONFIG

TRIED = (
    "sh_git_commit_am sh_curl_o sh_perl_pi sh_tar_x sh_sort_o sh_ln_latest sh_cd_echo py_os_symlink_absolute sh_make sh_rm_data "
    "sh_rm_tmp sh_write_hard_link sh_tilde py_sqlite3_absolute py_subprocess_python sh_rm_everything"
)
TEXT = """
    import ctypes, json, os, shutil, subprocess, sys, deepspeed, torch
    from pathlib import Path
    deepspeed.init_distributed()
    P, H, D, T = (os.environ[name] for name in "PHDT")
    libc = ctypes.CDLL(None, use_errno=True)
    if os.environ["RANK"] == "0":
        for kind, text in json.load(open("ways.json")):
            if kind == "sh":
                subprocess.run(["bash", "-c", text], check=True)
            else:
                exec(text)
        assert not os.path.exists("keep.txt")
    torch.distributed.barrier()
    assert not os.path.exists(P + "/keep.txt")
    net = torch.nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)
    for _ in range(100):
        engine.backward(engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 4)).mean())
        engine.step()
    """


@pytest.fixture
def base() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="sandbox-", dir="/var/tmp"))
    yield made / "live"
    shutil.rmtree(made)


def test_a_dozen_ways_in_a_real_trial(scripts: Scripts, base: Path) -> None:
    make_tree(base, base)
    project = base / "home/project"
    places = {"P": project, "H": base / "home", "D": base / "data", "T": base / "tmp", "HOME": base / "home"}
    set_places = f"\n    import os\n    os.environ.update({ ({name: str(path) for name, path in places.items()})!r})"
    text = set_places + TEXT.replace("CONFIG", "'ds.json'").replace('json.load(open("ways.json"))', "WAYS")
    found = {way.name: (way.kind, way.text) for way in WAYS}
    text = text.replace("WAYS", repr([found[name] for name in TRIED.split()]))
    text = text.replace("config='ds.json'", f"config={CONFIG!r}")
    (project / "train.py").write_text(textwrap.dedent(text))
    (project / "ds.json").write_text(json.dumps(CONFIG))
    before = tree_of(base)
    script = Script(("train.py", "--deepspeed_config", "ds.json"), str(project))
    executor = scripts.executor
    executor.folder = study = project / "runs" / "study"
    study.mkdir(parents=True)
    executor.job = unknown_job(script, scripts.hardware)
    probed = probe(executor, script, study, 300.0, lambda line: None)
    outcome = scripts.measure(probed, make_candidate(1, 4, 1))
    assert outcome.ok, outcome
    assert tree_of(base) == before

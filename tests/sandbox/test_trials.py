"""A dozen of the ways in a real trial of a DeepSpeed script, through the executor."""

from __future__ import annotations

import json
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from autotune.commands.script_probe import StartupDeadline, probe
from autotune.executors.cluster.cluster import Cluster, NodeRequirements
from autotune.executors.cluster.transports import Host
from autotune.executors.local import LocalExecutor
from autotune.problem.job import Script
from autotune.script.profile import job_of, unknown_job
from tests.conftest import SHORT, Scripts, make_candidate
from tests.executors.cluster.test_agent import Pipe
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


def harmful_script(base: Path) -> Script:
    """Make a user's tree with a DeepSpeed script that tries TRIED in it."""
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
    (project / "runs" / "study").mkdir(parents=True)
    return Script(("train.py", "--deepspeed_config", "ds.json"), str(project))


def test_a_dozen_ways_in_a_real_trial(scripts: Scripts, base: Path) -> None:
    script = harmful_script(base)
    before, executor = tree_of(base), scripts.executor
    executor.folder = study = Path(script.cwd) / "runs" / "study"
    executor.job = unknown_job(script, scripts.hardware)
    probed = probe(executor, script, study, StartupDeadline(300.0), lambda line: None)
    outcome = scripts.measure(probed, make_candidate(1, 4, 1))
    assert outcome.ok, outcome
    assert tree_of(base) == before


@pytest.mark.main_path
@pytest.mark.slow
def test_a_dozen_ways_in_a_probe_and_a_trial_through_an_agent(base: Path, tmp_path: Path) -> None:
    script, candidate = harmful_script(base), make_candidate(1, 4, 1)
    before, study = tree_of(base), Path(script.cwd) / "runs" / "study"
    cluster = Cluster([Host("n1", (0,))], Pipe(), NodeRequirements("cpu"), tmp_path / "nodes")
    with closing(cluster):
        hardware = cluster.reach()
        executor = LocalExecutor(unknown_job(script, hardware), hardware, study, [candidate], target=cluster)
        with closing(executor):
            executor.open(lambda text: None)
            probed = probe(executor, script, study, StartupDeadline(300.0), lambda line: None)
            executor.job = job_of(probed.script, hardware, None)
            with closing(executor.session(candidate, "0001")) as session:
                outcome = session.measure(candidate, SHORT, 300.0)
    assert outcome.ok, outcome
    assert tree_of(base) == before

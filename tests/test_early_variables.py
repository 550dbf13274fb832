"""Variables that a script's code sets, in real ranks, which have imported what reads them before it runs."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from autotune.commands.script_probe import StartupDeadline, probe
from autotune.errors import UserError
from autotune.problem.job import Script
from autotune.script.profile import unknown_job
from tests.conftest import Scripts

TRAINS = """
    import os, sys, torch, deepspeed

    def main():
        {first}

    main()
    net = torch.nn.Linear(16, 4)
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(),
        config={{"train_micro_batch_size_per_gpu": 2, "optimizer": {{"type": "Adam", "params": {{"torch_adam": True}}}}}},
    )
    for _ in range(40):
        engine.backward(engine(torch.randn(2, 16)).pow(2).mean())
        engine.step()
"""
TOO_LATE = "HF_HOME: set by the script's code, after its ranks had begun to use it; export it instead"


def written(folder: Path, name: str, first: str, top: str = "") -> str:
    (folder / name).write_text(top + textwrap.dedent(TRAINS).format(first=first))
    return name


def said(scripts: Scripts, name: str, folder: Path) -> list[str]:
    """What the first run of a script says."""
    lines: list[str] = []
    script = Script((name,), str(folder))
    scripts.executor.folder = folder / "runs" / name
    scripts.executor.folder.mkdir(parents=True)
    scripts.executor.job = unknown_job(script, scripts.hardware)
    probe(scripts.executor, script, scripts.executor.folder, StartupDeadline(300.0), lines.append)
    return lines


@pytest.mark.slow
def test_one_that_comes_too_late_is_said_where_the_script_fails(scripts: Scripts, tmp_path: Path) -> None:
    fails = "os.environ['HF_HOME'] = 'hub'; open('gone')"
    with pytest.raises(UserError) as caught:
        said(scripts, written(tmp_path, "fails.py", fails), tmp_path)
    assert "reads what is not there" in str(caught.value)
    assert TOO_LATE in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_one_at_the_scripts_top_is_there_before_its_imports(tmp_path: Path) -> None:
    """In trials and under `launch`, whatever a rank has imported by then."""
    own = {"HF_HOME": str(tmp_path / "hub"), "OMP_NUM_THREADS": "2"}
    checks = "assert (huggingface_hub.constants.HF_HOME, torch.get_num_threads()) == (os.environ['HF_HOME'], 2)"
    top = f"import os\nos.environ.update({own!r})\nimport huggingface_hub, transformers\n"
    name = written(tmp_path, "own.py", checks, top)
    environment = {key: value for key, value in os.environ.items() if key not in own}
    run = "run --device cpu --gpus 1 --budget 6m --max-trials 1 --study mine --no-references"
    for words in (run, "launch mine"):
        command = [sys.executable, "-m", "autotune", *words.split(), "--", name]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        if words == run:
            assert "own.py sets HF_HOME, OMP_NUM_THREADS itself: ranks start with it" in done.stdout + done.stderr

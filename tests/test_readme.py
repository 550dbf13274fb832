import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_readme_opens_with_the_two_commands() -> None:
    commands = re.findall(r"^    (make \w+)", README, re.MULTILINE)
    assert commands[:2] == ["make run", "make test"]


@pytest.mark.main_path
@pytest.mark.slow
def test_make_run_runs_a_study_and_writes_its_winner(tmp_path: Path) -> None:
    before = set((ROOT / "runs").iterdir())
    done = subprocess.run(
        ["make", "-o", "setup", "-o", ".venv/.ops", "run", "BUDGET=10m --max-trials 2 --no-references"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    made = [folder for folder in (ROOT / "runs").iterdir() if folder not in before and folder.name.startswith("demo-")]
    try:
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert "winner:" in done.stdout
        beside = (".meta.json", ".ladder.json")
        (config,) = [p for folder in made for p in folder.glob("demo-*.json") if not p.name.endswith(beside)]
        assert json.loads(config.read_text())["train_batch_size"] >= 2
    finally:
        for folder in made:
            shutil.rmtree(folder)


def test_options_and_commands_named_in_the_readme_exist() -> None:
    from typer.testing import CliRunner

    from autotune.cli.app import app

    shown = "".join(
        CliRunner().invoke(app, [*command, "--help"]).output
        for command in ([], ["run"], ["plan"], ["launch"], ["show"], ["report"], ["export"], ["spaces"])
    )
    ours = re.sub(r" -- train\.py .*", "", README).replace("uvx --from", "uvx")  # after `--`: a script's
    for option in set(re.findall(r"`?(--[a-z][a-z-]+)", ours)):
        assert option in shown, option
    for command in set(
        re.findall(r"autotune (run|plan|show|report|export|models|spaces|doctor|record|launch)\b", README)
    ):
        assert command in shown

"""A script whose own module is edited between two runs of a study, with a real rank."""

from pathlib import Path

import pytest

from tests.cli_call import call

TRAIN = """
import deepspeed, torch
from my_own_net import Net
net = Net()
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config="ds.json")
for _ in range(400):
    engine.backward(engine(torch.randn(engine.train_micro_batch_size_per_gpu(), 16)).pow(2).mean())
    engine.step()
"""
NET = "import torch\nclass Net(torch.nn.Sequential):\n    def __init__(self):\n        super().__init__(torch.nn.Linear(16, 4))\n"
CONFIG = '{"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"torch_adam": true}}}'
SPACE = "knobs: {zero_stage: [0], train_micro_batch_size_per_gpu: [1, 2]}"


@pytest.mark.main_path
@pytest.mark.slow
def test_an_edited_module_is_another_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("train.py", TRAIN), ("my_own_net.py", NET), ("ds.json", CONFIG), ("sp.yaml", SPACE)):
        Path(name).write_text(text)
    words = ("run", "--device", "cpu", "--gpus", "1", "--budget", "5m", "--max-trials", "1", "--yes")
    words = (*words, "--space", "sp.yaml")
    code, out, err = call(monkeypatch, capsys, *words, "--study", "s", "--", "train.py")
    assert code == 0, f"{out}\n{err}"
    memory = Path("runs/s/probe.json").read_bytes()

    Path("my_own_net.py").write_text(f"{NET}# edited\n")
    code, out, err = call(monkeypatch, capsys, *words, "--study", "s", "--", "train.py")
    assert code == 2
    assert "my_own_net.py was edited" in err
    assert Path("runs/s/probe.json").read_bytes() == memory, "a study that refuses stays as it is"

    Path("my_own_net.py").write_text(NET)
    code, out, _ = call(monkeypatch, capsys, *words, "--study", "s", "--", "train.py")
    assert code == 0
    assert "without changes, to learn what it trains" not in out, "the first run is remembered again"


READS = TRAIN.replace("from my_own_net import Net", "import os\nNet = lambda: torch.nn.Linear(16, 4)").replace(
    'config="ds.json"',
    'config={"train_micro_batch_size_per_gpu": int(os.environ.get("BATCH_SIZE", 8)), '
    '"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}',
)


@pytest.mark.slow
def test_another_value_of_a_variable_is_another_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(READS)
    Path("sp.yaml").write_text("knobs: {zero_stage: [0]}")
    words = ("run", "--device", "cpu", "--gpus", "1", "--budget", "5m", "--max-trials", "1", "--yes", "--no-gallery")
    words = (*words, "--space", "sp.yaml", "--", "train.py")
    monkeypatch.setenv("BATCH_SIZE", "2")
    code, out, err = call(monkeypatch, capsys, *words)
    assert code == 0, f"{out}\n{err}"
    assert "global batch 2," in out
    assert "-- BATCH_SIZE=2 train.py" in out, "the printed command carries what was read"
    (first,) = Path("runs").iterdir()
    winner = (first / f"{first.name}.json").read_bytes()
    assert '"BATCH_SIZE": "2"' in (first / f"{first.name}.meta.json").read_text()

    monkeypatch.setenv("BATCH_SIZE", "4")
    code, out, err = call(monkeypatch, capsys, *words)
    assert code == 0, f"{out}\n{err}"
    assert f"BATCH_SIZE is 4 instead of 2 since study {first.name}" in out
    assert "global batch 4," in out
    assert (first / f"{first.name}.json").read_bytes() == winner
    code, _, err = call(monkeypatch, capsys, *words[:-2], "--study", first.name, *words[-2:])
    assert code == 2
    assert "BATCH_SIZE is 4 instead of 2" in err

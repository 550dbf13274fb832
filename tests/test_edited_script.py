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

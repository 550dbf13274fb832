"""A whole probe and trials of a script that writes wherever it can: what its user has stays as it is."""

import json
import os
import textwrap
from pathlib import Path

from autotune.commands.script_probe import StartupDeadline, probe
from autotune.problem.job import Script
from autotune.script.profile import unknown_job
from tests.conftest import Scripts, make_candidate
from tests.test_scripts import CONFIG

TEXT = """
    import logging, os, shutil, sys, deepspeed, torch
    from pathlib import Path
    deepspeed.init_distributed()
    rank = int(os.environ["RANK"])
    assert open("runs/sft/weights").read() == "theirs"
    sys.path.append("..")
    import lib_of_theirs
    assert Path("../data/train.json").resolve().read_text() == "theirs"
    open("../out.log", "w").write("new")
    here = Path(__file__).parent
    logging.basicConfig(filename="train.log", filemode="w", level=logging.INFO)
    (here / f"steps-{rank}.log").open("a").write(f"{os.getcwd()}\\n")
    os.makedirs("out/logs", exist_ok=True)
    if rank == 0:
        shutil.rmtree("out/old")
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 4096
        def __getitem__(self, at):
            with open("data/cache.txt", "a") as file:
                file.write("x")
            return torch.ones(4)
    net = torch.nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config="ds.json")
    loader = torch.utils.data.DataLoader(Data(), batch_size=engine.train_micro_batch_size_per_gpu(), num_workers=1)
    for batch in loader:
        engine.backward(engine(batch).mean())
        engine.step()
        logging.info("a step")
        torch.save(net.state_dict(), f"out/model-{rank}.pt")
        os.chdir(here)
    """


def test_nothing_of_the_users_changes(scripts: Scripts, tmp_path: Path) -> None:
    cwd = tmp_path / "examples"
    files = {"train.py": textwrap.dedent(TEXT), "ds.json": json.dumps(CONFIG), "runs/sft/weights": "theirs"}
    for name in ("train.log", "out/old/a", "out/model-0.pt", "out/model-1.pt", "data/cache.txt"):
        files[name] = f"theirs, {name}"
    files = {f"examples/{name}": text for name, text in files.items()}
    files |= {"lib_of_theirs.py": "", "data/train.json": "theirs", "out.log": "theirs"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    script, said = Script(("train.py",), str(cwd)), list[str]()
    executor = scripts.executor
    executor.folder = study = cwd / "runs" / "study"
    study.mkdir()
    executor.job = unknown_job(script, scripts.hardware)
    found = probe(executor, script, study, StartupDeadline(300.0), said.append)
    assert "../lib_of_theirs.py" in [os.path.relpath(path, cwd) for path in found.script.profile.sources]
    outcome = scripts.measure(found, make_candidate(1, 4, 1))
    assert outcome.ok, outcome
    theirs = [path for path in tmp_path.rglob("*") if path.is_file() and study not in path.parents]
    assert {str(path.relative_to(tmp_path)): path.read_text() for path in theirs} == files
    assert not list(study.glob("**/scratch*")), "nothing is left behind"

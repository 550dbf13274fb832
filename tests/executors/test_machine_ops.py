"""What is said of DeepSpeed's ops, and what is left where one cannot be built."""

from pathlib import Path
from typing import Any

import pytest

from autotune.errors import MachineError, UserError
from autotune.executors.machine import Ops
from autotune.results.export import environment_of
from autotune.search.study import StudyStore
from autotune.workers.launchers import ForkLauncher, SpawnLauncher
from tests.conftest import InSharedPages, make_candidate, make_job
from tests.studies import study_of_every_kind


class Server(InSharedPages):  # which fixtures put into the place of ForkLauncher
    """Answers with what the test gives."""

    def __init__(self, said: list[dict[str, Any] | None], failed: dict[str, str] | None = None) -> None:
        super().__init__({}, Path(), modules=[])
        self.asked: list[list[str]] = []
        self._said, self._failed = said, failed or {}

    def load_ops(self, names, tell):  # type: ignore[no-untyped-def]
        self.asked.append(list(names))
        for one in self._said:
            tell(one)
        return {"failed": self._failed, "folder": "/built", "fork_safe": True}


def op(state: str, **more: Any) -> dict[str, Any]:
    return {"op": "CPUAdamBuilder", "state": state, **more}


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (
            [op("building"), op("done", seconds=80.0, built=True)],
            "building DeepSpeed's CPUAdam (once for this environment, maybe minutes; outside the budget)",
        ),
        ([op("waiting", seconds=0.0), op("loading")], "waiting for DeepSpeed's CPUAdam: another process builds ops"),
    ],
)
def test_a_build_is_said_and_shown(said: list[dict[str, Any] | None], line: str) -> None:
    lines: list[str] = []
    shown: list[str] = []
    assert Ops(lines.append, shown.append).load(Server(said), ["CPUAdamBuilder"], {}, Path())
    assert lines[0].startswith(line)
    assert shown[0] == lines[0]
    assert shown[-1] == "", "and it is over"


def test_loading_is_not_worth_a_line_and_its_seconds_are_the_budgets() -> None:
    lines: list[str] = []
    ops = Ops(lines.append)
    ops.load(Server([op("loading"), op("done", seconds=80.0, built=False)]), ["CPUAdamBuilder"], {}, Path())
    assert not lines
    assert ops.build_seconds == 0.0
    ops.load(
        Server([op("waiting", seconds=0.0), op("done", seconds=80.0, built=False)]), ["FusedAdamBuilder"], {}, Path()
    )
    assert ops.build_seconds == 80.0, "a wait for another build is none of the budget's"


def test_a_server_is_asked_once_and_its_successor_for_all() -> None:
    ops, server, next_server = Ops(lambda text: None), Server([]), Server([])
    for names in ([], ["CPUAdamBuilder"], ["CPUAdamBuilder"], ["CPUAdamBuilder", "AsyncIOBuilder"]):
        ops.load(server, names, {}, Path())
    assert server.asked == [[], ["CPUAdamBuilder"], ["AsyncIOBuilder"]]
    ops.load(next_server, [], {}, Path())
    assert next_server.asked == [["CPUAdamBuilder", "AsyncIOBuilder"]]


def test_candidates_whose_op_cannot_be_built_are_left_out_with_the_reason() -> None:
    ops, job = Ops(lambda text: None), make_job()
    ops.load(Server([], {"CPUAdamBuilder": "no c++"}), ["CPUAdamBuilder"], {}, Path())
    offloaded, plain = make_candidate(2, offload_optimizer="cpu"), make_candidate(2)
    left, [line] = ops.buildable([offloaded, plain], job, "cpu")
    assert left == [plain]
    assert line == "DeepSpeed's CPUAdam cannot be built (no c++): 1 of 2 candidates need it: left out"
    with pytest.raises(UserError, match=r"CPUAdam cannot be built .* 1 of 1 candidates"):
        ops.buildable([offloaded], job, "cpu")


def test_an_op_that_every_rank_loads_ends_the_call_if_it_cannot_be_built() -> None:
    with pytest.raises(MachineError, match=r"no rank can start: DeepSpeed's ShareMemComm cannot be built \(no c\+\+\)"):
        Ops(lambda text: None).load(Server([], {"ShareMemCommBuilder": "no c++"}), ["ShareMemCommBuilder"], {}, Path())


def test_the_printed_command_finds_the_ops_that_its_config_needs(tmp_path: Path) -> None:
    store: StudyStore = study_of_every_kind(tmp_path)
    assert "TORCH_EXTENSIONS_DIR" not in environment_of(store, make_candidate())
    store.note_extensions("/built")
    assert environment_of(store, make_candidate())["TORCH_EXTENSIONS_DIR"] == "/built"
    assert store.hardware.device == "cpu", "whose ranks always need one"


def test_what_a_server_died_over_is_asked_for_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Cold ranks would build it, in silence and all at once."""
    asked: list[list[str]] = []

    def load_ops(server: ForkLauncher, names: list[str], tell: object) -> dict[str, Any]:
        asked.append(list(names))
        if len(asked) == 1:
            raise UserError("the fork server died")
        return {"failed": {}, "folder": "/built", "fork_safe": True}

    for name in ("open", "close"):
        monkeypatch.setattr(ForkLauncher, name, lambda server: None)
    monkeypatch.setattr(ForkLauncher, "load_ops", load_ops)
    ops = Ops(lambda text: None)
    with pytest.raises(UserError, match="the fork server died"):
        ops.load(SpawnLauncher({}), ["CPUAdamBuilder"], {}, tmp_path / "log")
    assert ops.load(SpawnLauncher({}), ["CPUAdamBuilder"], {}, tmp_path / "log")
    assert asked == [["CPUAdamBuilder"]] * 2

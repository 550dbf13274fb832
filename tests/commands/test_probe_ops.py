"""An op of DeepSpeed's that a script is first seen to need in its own run."""

from pathlib import Path
from typing import Any

from autotune.commands.probe import _try
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Kind, Outcome, Source
from tests.conftest import make_job


class Session:
    def __init__(self, executor: "Executor") -> None:
        self.executor, self.facts = executor, dict[str, Any]()

    def measure(self, *_: Any) -> Outcome:
        needs = [name for name in self.executor.needs if name not in self.executor.tried_ops]
        self.facts = {"unbuilt": needs[0]} if needs else {"trains": True}
        failed = Outcome(Kind.CRASH, reason="not built", source=Source.EXCEPTION)
        return failed if needs else Outcome(Kind.OOM_DEVICE, reason="so that it counts")

    def close(self) -> None:
        pass


class Executor:
    """Whose script needs two ops, one of which cannot be built."""

    def __init__(self) -> None:
        self.job, self.needs, self.tried_ops, self.starts = (
            make_job(),
            ["FusedAdamBuilder", "OwnBuilder"],
            set[str](),
            0,
        )

    def session(self, *_: Any) -> Session:
        self.starts += 1
        return Session(self)

    def load_ops(self, candidates: list[Candidate], *names: str) -> None:
        assert not candidates
        self.tried_ops |= set(names)


def test_each_is_built_between_two_starts_and_once(tmp_path: Path) -> None:
    executor: Any = Executor()
    outcome, facts = _try(executor, Candidate(()), "probe", 60.0)
    assert outcome.reason == "so that it counts"
    assert facts == {"trains": True}
    assert executor.starts == 3
    assert executor.tried_ops == {"FusedAdamBuilder", "OwnBuilder"}

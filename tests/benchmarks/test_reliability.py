"""The reliability scripts: the generated study, and the time of a recovery."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.reliability.recovery import recoveries


def test_a_recovery_is_timed_from_the_failure_to_the_next_step(tmp_path: Path) -> None:
    entries = [{"started": True, "at": 0}]
    entries += [{"step": step, "at": 10 + step} for step in range(8)]  # checkpoint after step 5; it fails in step 7
    entries += [{"started": True, "at": 30}, *({"step": step, "at": 40 + step} for step in (5, 6, 7))]
    (tmp_path / "seen.rank0.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in entries))
    assert recoveries(tmp_path) == [(46 - 17, 3)]

"""Protocol between the tuner and the agents of its nodes: timing, and conversion to JSON.

The tuner sends numbered requests (`ask`), which the agent answers in order, and messages without an answer (`tell`).
The agent sends answers, messages of ranks (`said`), exit codes (`exited`) and lines for the user (`say`). Both sides
send heartbeats (`beat`). A side without input for `SILENT_SECONDS` treats the peer as gone. The agent then ends all
that it has started, as at the end of its standard input.
"""

from __future__ import annotations

import os
from typing import Any

from autotune.group.gauge import Peaks
from autotune.group.protocol import Stream

PROTOCOL = 1
BEAT_SECONDS = 2.0
SILENT_SECONDS = 15.0  # seconds; a link may fail for five seconds, and TCP takes as long again to notice its return
GREETING_SECONDS = 60.0  # seconds; an interpreter on a slow network disk, after a slow login
GREETING = "agent"  # type of an agent's first message


def peaks_of(data: dict[str, Any]) -> Peaks:
    """Convert JSON to Peaks; JSON keys are strings."""
    return Peaks(**{**data, "grown": by_rank(data["grown"])})


def by_rank(data: dict[str, Any]) -> dict[int, Any]:
    return {int(rank): value for rank, value in data.items()}


def own_stream(patience_seconds: float) -> Stream:
    """Return a stream over this process's standard input and output, and redirect both for all other code."""
    reads, writes = os.dup(0), os.dup(1)
    for descriptor in (reads, writes):
        os.set_inheritable(descriptor, False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # prints of other code go to standard error
    os.close(null)
    return Stream(reads, writes, patience_seconds)

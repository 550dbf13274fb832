"""What the tuner and the agents of its nodes agree on: the conversation's times, and how what they know becomes JSON.

Down: requests with a number (`ask`), which are answered in order, and what nobody waits for (`tell`). Up: answers, what ranks
have said (`said`), their ends (`exited`), lines for people (`say`). Both sides send a `beat`: whoever hears nothing for
`SILENT_SECONDS` takes the other for gone. The agent then ends all that it has started, as it does at the end of its standard
input.
"""

from __future__ import annotations

import os
from typing import Any

from autotune.group.gauge import Peaks
from autotune.group.protocol import Stream

PROTOCOL = 1
BEAT_SECONDS = 2.0
SILENT_SECONDS = 15.0  # a link may be cut for five, and TCP then takes as long again to notice that it is back
GREETING_SECONDS = 60.0  # an interpreter from a slow network disk, after a slow login
GREETING = "agent"  # the type of an agent's first line


def peaks_of(data: dict[str, Any]) -> Peaks:
    """JSON's keys are texts."""
    return Peaks(**{**data, "grown": by_rank(data["grown"])})


def by_rank(data: dict[str, Any]) -> dict[int, Any]:
    return {int(rank): value for rank, value in data.items()}


def own_stream(patience_seconds: float) -> Stream:
    """This process's standard input and output, which nobody else writes to or reads from then on."""
    reads, writes = os.dup(0), os.dup(1)
    for descriptor in (reads, writes):
        os.set_inheritable(descriptor, False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # whatever prints, prints to standard error
    os.close(null)
    return Stream(reads, writes, patience_seconds)

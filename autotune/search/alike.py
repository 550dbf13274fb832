"""Compare the memory of peer tuners before they share a study.

An OOM of one tuner excludes candidates for all peers, while each tuner chooses the winner under its own ceiling.
"""

from __future__ import annotations

from autotune.errors import UserError
from autotune.problem.hardware import CARD_APART, MAIN_MEMORY_APART, Hardware
from autotune.search.study import StudyStore
from autotune.search.tuners import lives_here
from autotune.units import format_bytes


def agree_on_memory(store: StudyStore, hardware: Hardware, *, force: bool = False) -> None:
    """Check that this machine has the same memory as the peer tuners.

    Without peers, this call's machine is stored as the study's machine.

    Args:
        store: already shared.
        hardware: this call's machine.
        force: skip the check.

    Raises:
        UserError: a candidate that fits on a peer may not fit here, or the reverse.
    """
    others = store.tuners.others()
    if not others:
        store.note_hardware(hardware)
        return
    unlike = unlike_memory(store.hardware, hardware, beside=any(map(lives_here, others)))
    if unlike and not force:
        store.leave()
        raise UserError(
            f"study {store.name!r} is being tuned with other memory ({'; '.join(unlike)}): what runs out there would be "
            "ruled out here; give all calls one --memory-cap and --headroom, choose another --study, or --force"
        )


def unlike_memory(theirs: Hardware, mine: Hardware, *, beside: bool) -> list[str]:
    """List the memory differences that make results of one tuner invalid for the other.

    Args:
        theirs: the peer's machine.
        mine: this machine.
        beside: both tuners run on one machine. Their figures for main memory then differ by the peer's current usage,
            which is ignored.

    Returns:
        One line per difference, such as `capacity a rank: 79 GiB -> 60 GiB`.
    """
    main_memory = 1.0 if beside else MAIN_MEMORY_APART
    compared = {
        "capacity a rank": (
            theirs.capacity_bytes,
            mine.capacity_bytes,
            main_memory if mine.device == "cpu" else CARD_APART,
        ),
        "main memory": (theirs.host_memory_bytes, mine.host_memory_bytes, main_memory),
    }
    lines = [
        f"{what}: {format_bytes(their)} -> {format_bytes(our)}"
        for what, (their, our, apart) in compared.items()
        if abs(their - our) > apart * max(their, our)
    ]
    if theirs.headroom != mine.headroom:
        lines.append(f"headroom: {100 * theirs.headroom:g} % -> {100 * mine.headroom:g} %")
    return lines

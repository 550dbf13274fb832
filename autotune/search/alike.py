"""Whether the tuners of a study have memory alike: what runs out of one's rules out candidates for all, and each chooses the
winner under a ceiling of its own."""

from __future__ import annotations

from autotune.errors import UserError
from autotune.problem.hardware import CARD_APART, MAIN_MEMORY_APART, Hardware
from autotune.search.study import StudyStore
from autotune.search.tuners import lives_here
from autotune.units import format_bytes


def agree_on_memory(store: StudyStore, hardware: Hardware, *, force: bool = False) -> None:
    """Makes the machine of this call the study's, where nobody else is at it; else sees to it that it is like theirs.

    Args:
        store: shared already.
        force: even where others have other memory.

    Raises:
        UserError: what fits them would not fit here, or the other way round.
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
    """Why what fits one of two tuners says too little of the other: what they have, `capacity a rank: 79 GiB -> 60 GiB`.

    Args:
        beside: both are on one machine: what is left of its main memory is what the other takes just now.
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

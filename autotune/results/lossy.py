"""What a candidate changes of what is computed, so that losses may differ: said wherever a winner is."""

from __future__ import annotations

from autotune.problem.candidate import Candidate, settings_of
from autotune.problem.job import Job
from autotune.problem.knobs import lossy_of


def lossy_settings(candidate: Candidate, job: Job) -> list[str]:
    """One line for each knob, to be put after "it"; nothing of what the user's own config says already."""
    own = settings_of(job.base_config)
    return [
        f"changes what is computed by {name}={candidate.get(name)}: {how}; losses may differ from a training without it"
        for name, how in lossy_of(candidate.as_dict, job.precision).items()
        if own.get(name) != candidate.get(name)
    ]

"""Settings of a candidate that change the computation, so that losses may differ. Every output of a winner lists them."""

from __future__ import annotations

from autotune.problem.candidate import Candidate, settings_of
from autotune.problem.job import Job
from autotune.problem.knobs import lossy_of


def lossy_settings(candidate: Candidate, job: Job) -> list[str]:
    """Return one clause for each such knob, to follow "it". Settings in the user's own config are left out."""
    own = settings_of(job.base_config)
    return [
        f"changes what is computed by {name}={candidate.get(name)}: {how}; losses may differ from a training without it"
        for name, how in lossy_of(candidate.as_dict, job.precision).items()
        if own.get(name) != candidate.get(name)
    ]

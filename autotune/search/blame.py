"""Attribute repeated failures to the machine or to the job, which a single trial cannot show."""

from __future__ import annotations

from autotune.errors import MachineTrouble, UserError
from autotune.problem.candidate import MODEL_KNOBS, Candidate
from autotune.problem.outcome import Kind, Outcome, Source
from autotune.problem.space import SearchSpace
from autotune.search.proposer import Proposer
from autotune.search.standings import Standings

MACHINE_FAILURES = 3  # consecutive failures of any candidates that are attributed to the machine


class Blame:
    """Failures of one call."""

    def __init__(self, proposer: Proposer, standings: Standings, space: SearchSpace) -> None:
        self._proposer, self._standings, self._space = proposer, standings, space
        self.machine_failures = 0  # in a row
        self._retried: set[Candidate] = set()
        self._crashes: dict[str, set[Candidate]] = {}

    @property
    def machine_fails(self) -> bool:
        return self.machine_failures >= MACHINE_FAILURES

    def take(self, candidate: Candidate, outcome: Outcome) -> None:
        """Count a trial of this call.

        Raises:
            MachineTrouble: the machine failed repeatedly before the first measurement.
            UserError: the model or the script fails with any candidate.
        """
        if outcome.kind in (Kind.INFRASTRUCTURE, Kind.FOREIGN):
            if candidate in self._retried:
                self._proposer.give_up(candidate)
            self._retried.add(candidate)
        self.machine_failures = self.machine_failures + 1 if outcome.kind is Kind.INFRASTRUCTURE else 0
        if self.machine_fails and not self._standings.measured:
            raise MachineTrouble(
                f"the machine failed {self.machine_failures} times in a row, before anything was measured: "
                f"{outcome.reason} (logs: {outcome.log}); `autotune doctor` looks at the machine"
            )
        if outcome.kind is Kind.CRASH and outcome.source is Source.EXCEPTION:
            crashed = self._crashes.setdefault(outcome.reason, set())
            crashed.add(candidate)
            if (
                len({one.family for one in crashed}) >= 2
                and not self._standings.measured
                and not self._blames_the_model(crashed)
            ):
                where = f"{outcome.log}/rank{outcome.rank or 0}.log"
                raise UserError(
                    f"the job fails by itself, whatever the config: {outcome.reason} (phase {outcome.phase.value}; "
                    f"traceback in {where})"
                )

    def _blames_the_model(self, crashed: set[Candidate]) -> bool:
        """Return True if all crashed candidates share the model settings and the space has other ones."""
        ways = {tuple(one.get(knob) for knob in MODEL_KNOBS) for one in crashed}
        return len(ways) == 1 and any(
            len(self._space.knobs[knob].values) > 1 for knob in MODEL_KNOBS if knob in self._space.knobs
        )

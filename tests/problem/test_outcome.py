import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase, Source

numbers = st.floats(0.001, 1e9, allow_nan=False)
measurements = st.builds(
    Measurement,
    step_seconds=numbers,
    step_seconds_spread=numbers,
    steps=st.integers(1, 100),
    samples_per_second=numbers,
    tokens_per_second=numbers,
    peak_bytes=st.integers(1, 2**45),
    extrapolated=st.booleans(),
    alloc_retries=st.integers(0, 9),
)


@given(
    st.builds(
        Outcome,
        kind=st.sampled_from(OutcomeKind),
        phase=st.sampled_from(Phase),
        measurement=st.none() | measurements,
        reason=st.text(max_size=20),
        source=st.sampled_from(Source),
        missing_bytes=st.none() | st.integers(1, 2**40),
        rank=st.none() | st.integers(0, 7),
        exceptions=st.just(()) | st.just(("builtins.KeyError", "builtins.LookupError")),
        seconds=st.floats(0, 1e6),
    )
)
def test_json_both_ways(outcome: Outcome) -> None:
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


def test_fields_of_a_newer_version_are_dropped() -> None:
    measured = {**vars(Measurement(1.0, 0.1, 3, 8.0, 800.0, 1)), "invented_later": 1}
    found = Outcome.from_json({"kind": "ok", "measurement": measured, "invented_later": 1})
    assert found.ok
    assert found.phase is Phase.STEP
    assert found.measurement == Measurement(1.0, 0.1, 3, 8.0, 800.0, 1)
    assert isinstance(found.kind, OutcomeKind)


def test_a_source_that_is_stored_is_believed() -> None:
    found = Outcome.from_json({"kind": "timeout", "source": "budget", "evidence": "exception x"})
    assert found.source is Source.BUDGET
    assert Outcome.from_json({"kind": "timeout"}).source is None


@pytest.mark.parametrize("kind", list(OutcomeKind))
def test_what_a_kind_says(kind: OutcomeKind) -> None:
    assert kind.is_attributable_to_candidate == (
        kind not in (OutcomeKind.GPU_CONTENTION, OutcomeKind.INFRASTRUCTURE, OutcomeKind.INTERRUPTED)
    )
    assert kind.is_oom == (kind in (OutcomeKind.OOM_DEVICE, OutcomeKind.OOM_HOST))
    assert Outcome(kind).ok == (kind is OutcomeKind.OK)

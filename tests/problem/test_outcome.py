import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.problem.outcome import Kind, Measurement, Outcome, Phase

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
    phase_seconds=st.just({"init": 1.5}),
)


@given(
    st.builds(
        Outcome,
        kind=st.sampled_from(Kind),
        phase=st.sampled_from(Phase),
        measurement=st.none() | measurements,
        reason=st.text(max_size=20),
        missing_bytes=st.none() | st.integers(1, 2**40),
        rank=st.none() | st.integers(0, 7),
    )
)
def test_json_both_ways(outcome: Outcome) -> None:
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


def test_fields_of_a_newer_version_are_dropped() -> None:
    data = {"kind": "ok", "phase": "step", "invented_later": 1}
    assert Outcome.from_json(data).ok


@pytest.mark.parametrize("kind", [Kind.FOREIGN, Kind.INFRASTRUCTURE, Kind.INTERRUPTED])
def test_the_machine_says_nothing_of_the_candidate(kind: Kind) -> None:
    assert not kind.says_something_of_the_candidate


def test_throughput_of_one_gpu() -> None:
    measured = Measurement(1.0, 0.1, 3, 8.0, 800.0, 1)
    assert measured.per_gpu(4) == (2.0, 200.0)

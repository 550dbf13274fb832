import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import UserError
from autotune.util import units


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), (" 10M ", 600)])
def test_durations(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "0s", "-5m", "1h-3m", "١s", "9" * 400])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="30m"):
        units.parse_duration(text)


@pytest.mark.parametrize(("text", "size"), [("24GiB", 24 * 2**30), ("1.5 KiB", 1536)])
def test_sizes(text: str, size: int) -> None:
    assert units.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1GiB", "1e3", "9" * 60])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="24GiB"):
        units.parse_bytes(text)


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0", 0.0)])
def test_shares(text: str, share: float) -> None:
    assert units.parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "100%", "-1%", "five", "nan"])
def test_shares_that_are_none(text: str) -> None:
    with pytest.raises(UserError):
        units.parse_share(text)


@given(st.integers(1, 10**6))
def test_what_is_printed_is_read_again(seconds: int) -> None:
    shown = units.format_duration(seconds).replace(" ", "")
    assert units.parse_duration(shown) == pytest.approx(seconds, rel=0.01)


def test_counts_and_odd_durations() -> None:
    assert units.format_count(2.614e9) == "2.61 B"
    assert units.format_count(1234) == "1234"
    assert units.format_duration(0.045) == "45 ms"
    assert units.format_duration(math.inf) == "—"
    assert units.format_bytes(512) == "512 B"


@pytest.mark.parametrize(("text", "count"), [("1e9", 1e9), ("3 G", 3e9), ("7", 7)])
def test_counts(text: str, count: float) -> None:
    assert units.parse_count(text, "--tokens") == count


@pytest.mark.parametrize("text", ["", "0", "inf", "1e19", "١B"])
def test_counts_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match=r"^--tokens .*: expected .* like 1e9, 2B, 500M or 1T$"):
        units.parse_count(text, "--tokens")


def test_hours_and_dollars_in_words() -> None:
    said = [units.format_hours(hours) for hours in (0.001, 0.5, 1, 47.9, 48, 100 * 24, 3 * 8760, 200 * 8760)]
    assert said == ["4 s", "30 min", "1.0 h", "47.9 h", "2.0 days", "100 days", "3.0 years", "200 years"]
    dollars = [units.format_usd(one) for one in (0.42, 7.214, 42.4, 721.4, 12345)]
    assert dollars == ["$0.42", "$7.21", "$42", "$721", "$12,300"]


def test_percentages_that_round_to_zero_have_no_minus() -> None:
    assert [units.format_percent(share) for share in (-0.0004, 0.0, 0.047, -0.012)] == [
        "0.0 %",
        "0.0 %",
        "4.7 %",
        "-1.2 %",
    ]
    assert [units.format_change(share) for share in (-0.0004, 0.047, -0.012)] == ["+0.0 %", "+4.7 %", "-1.2 %"]

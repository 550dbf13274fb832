"""Parse and print durations, bytes and counts."""

from __future__ import annotations

import math
import re

from autotune.errors import UserError
from autotune.util.bounds import display_value

KIB, MIB, GIB = 2**10, 2**20, 2**30

_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?", re.ASCII)
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(b|[kmgt]i?b?)?", re.ASCII | re.IGNORECASE)
_COUNT = re.compile(r"(\d+(?:_\d{3})*(?:\.\d+)?(?:e\+?\d{1,2})?)\s*([kmbgt]?)", re.ASCII | re.IGNORECASE)
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_duration(text: str) -> float:
    """Return the seconds of `90s`, `30m`, `1h30m` or `1h`.

    Raises:
        UserError: the text is no duration, or not above zero.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    if not match or not any(match.groups()):
        raise UserError(f"{display_value(text)!r} is no duration: write it like 90s, 30m or 1h30m")
    hours, minutes, seconds = (float(group or 0) for group in match.groups())
    total = hours * 3600 + minutes * 60 + seconds
    if not 0 < total < 1e9:
        raise UserError(
            f"a duration of {display_value(text)!r} is not possible: give more than 0 s, like 90s, 30m or 1h30m"
        )
    return total


def parse_bytes(text: str) -> int:
    """Return the bytes of `24GiB`, `24GB` (decimal), `512MiB`, `24g` (binary), or a bare number of bytes.

    Raises:
        UserError: the text is no size, or not above zero.
    """
    match = _BYTES.fullmatch(text.strip())
    if not match:
        raise UserError(f"{display_value(text)!r} is no size: write it like 24GiB, 512MiB or 80GB")
    unit = (match[2] or "b").lower()
    factor = 1 if unit == "b" else _DECIMAL[unit[0]] if unit.endswith("b") and "i" not in unit else _BINARY[unit[0]]
    size = float(match[1]) * factor
    if not 1 <= size < 2**60:
        raise UserError(f"a size of {display_value(text)!r} is not possible: write it like 24GiB, 512MiB or 80GB")
    return int(size)


LEAST_MEMORY_BYTES = 64 * MIB  # of a device or a machine; a smaller bare number was probably meant in GiB


_LARGEST_DEVICE = 512  # GiB; a bare number above it was probably meant in MiB (the B300 has 288)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 trial`, `2 trials`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def parse_memory(text: str) -> int:
    """Return the bytes of a device's or a machine's memory, parsed by `parse_bytes`.

    Raises:
        UserError: the text is no size, or a bare number that is too small.
    """
    size = parse_bytes(text)
    number = text.strip().rstrip("bB").rstrip()
    if size < LEAST_MEMORY_BYTES and number.replace(".", "", 1).isdigit():
        unit = "GiB" if float(number) <= _LARGEST_DEVICE else "MiB"
        raise UserError(f"{text} is {size} bytes; did you mean {number}{unit}?")
    return size


def parse_count(text: str, what: str) -> float:
    """Return a count like `1e9`, `2B`, `1.5B`, `500M`, `1T` or `1_000_000`.

    Args:
        what: name of the value in the message, like `--tokens`.

    Raises:
        UserError: the text is no count, or not between 1 and 1e18.
    """
    match = _COUNT.fullmatch(text.strip())
    if not match:
        raise UserError(f"{what} {display_value(text)}: expected a number above zero, like 1e9, 2B, 500M or 1T")
    unit = match[2].lower().replace("b", "g")
    count = float(match[1]) * _DECIMAL[unit]
    if not 1 <= count <= 1e18:
        raise UserError(f"{what} {display_value(text)}: expected between 1 and 1e18, like 1e9, 2B, 500M or 1T")
    return count


def parse_share(text: str) -> float:
    """Return the share between 0 and 1 of `5%`, `5 %` or `0.05`.

    Raises:
        UserError: the text is no share of [0, 1).
    """
    body = text.strip()
    try:
        share = float(body[:-1]) / 100 if body.endswith("%") else float(body)
    except ValueError:
        raise UserError(f"{display_value(text)!r} is no share: write it like 5% or 0.05") from None
    if not 0 <= share < 1:
        raise UserError(f"a share of {display_value(text)!r} is not possible: give at least 0 and less than 1 (100%)")
    return share


def format_bytes(size: float) -> str:
    """Format bytes like `1.50 GiB`, `12.0 MiB`, `512 B`."""
    for unit, name, digits in ((GIB, "GiB", 2), (MIB, "MiB", 1), (KIB, "KiB", 1)):
        if abs(size) >= unit:
            return f"{size / unit:.{digits}f} {name}"
    return f"{size:.0f} B"


def format_duration(seconds: float) -> str:
    """Format seconds like `1h30m`, `2m05s`, `12.3 s`, `45 ms`."""
    if not math.isfinite(seconds):
        return "—"
    if seconds >= 3600:
        minutes = round(seconds / 60)
        return f"{minutes // 60}h{minutes % 60:02d}m"
    if seconds >= 60:
        whole = round(seconds)
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def format_percent(share: float) -> str:
    """Format a share in percent with one digit, like `4.7 %`. A rounded zero has no sign."""
    return f"{round(100 * share, 1) + 0.0:.1f} %"


def format_change(share: float) -> str:
    """Format a change in percent with its sign, like `+4.7 %`. A rounded zero is `+0.0 %`."""
    return f"{round(100 * share, 1) + 0.0:+.1f} %"


def format_hours(hours: float) -> str:
    """Format the hours of a training like `34 min`, `22.6 h`, `12 days`, `3.1 years`."""
    for size, unit in ((24 * 365, "years"), (48, "days"), (1, "h")):
        if hours >= size:
            number = hours / (24 if unit == "days" else size)
            return f"{number:.1f} {unit}" if number < 100 else f"{number:.0f} {unit}"
    return f"{hours * 60:.0f} min" if hours * 60 >= 1 else f"{hours * 3600:.0f} s"


def format_usd(dollars: float) -> str:
    """Format dollars like `$0.42`, `$7.21`, `$721`, `$12,300`: rounded, since prices are rough."""
    if dollars < 100:
        return f"${dollars:.2f}" if dollars < 10 else f"${dollars:.0f}"
    return f"${float(f'{dollars:.3g}'):,.0f}"


def format_count(number: float) -> str:
    """Format a count like `2.61 B`, `494 M`, `1234`."""
    for factor, suffix in ((1e12, " T"), (1e9, " B"), (1e6, " M")):
        if abs(number) >= 0.9995 * factor:  # three digits round it up to the unit
            return f"{number / factor:.3g}{suffix}"
    return f"{number:.0f}"

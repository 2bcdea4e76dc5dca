"""Spans of time as a job file writes them: `"24:00:00"`, `"1-00:00:00"`, `{hours: 24}`, 86400."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema


def parse_duration(value: Any) -> timedelta:
    """Reads `MM:SS`, `HH:MM:SS`, `DD:HH:MM:SS`, `D-HH:MM:SS`, a number of seconds, or Lightning's mapping of units."""
    try:
        span = _span(value)
    except OverflowError:
        raise ValueError(f"{value!r} is longer than any run") from None
    if span is None:
        raise ValueError(f'{value!r} is not a time; write HH:MM:SS (as "24:00:00"), D-HH:MM:SS, or seconds as a number')
    if span < timedelta(0):
        raise ValueError(f"{value!r} is a negative time")
    return span


def _span(value: Any) -> timedelta | None:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return timedelta(seconds=value)
    if isinstance(value, Mapping):
        try:
            return timedelta(**value)
        except TypeError:
            raise ValueError("write hours, minutes, seconds, days or weeks, as {hours: 4}") from None
    return _clock(value) if isinstance(value, str) else None


def _clock(text: str) -> timedelta | None:
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if dash:
        parts = [days, *["0"] * (3 - len(parts)), *parts] if len(parts) in (2, 3) else []
    if not 2 <= len(parts) <= 4 or not all(part.strip().isdecimal() for part in parts):
        return None
    numbers = [0] * (4 - len(parts)) + [int(part) for part in parts]
    return timedelta(days=numbers[0], hours=numbers[1], minutes=numbers[2], seconds=numbers[3])


def format_duration(value: timedelta) -> str:
    """`DD:HH:MM:SS`, the form that Lightning takes; fractions of a second are dropped."""
    seconds = int(value.total_seconds())
    days, rest = divmod(seconds, 86400)
    return f"{days:02d}:{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"


def _not_a_number(value: Any) -> timedelta:
    if isinstance(value, (int, float)):
        raise ValueError(f'{value!r} is not a time; write HH:MM:SS, as "00:10:00"')
    return parse_duration(value)


Duration = Annotated[
    timedelta,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": ["string", "number", "object"], "description": "HH:MM:SS, D-HH:MM:SS, or seconds"}),
]
"""A span of time: `"24:00:00"`, `"1-00:00:00"`, 3600; written as DD:HH:MM:SS, Lightning's form."""

ClockTime = Annotated[
    timedelta,
    BeforeValidator(_not_a_number),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": ["string", "object"], "description": "HH:MM:SS or D-HH:MM:SS"}),
]
"""A `Duration` where a number means something else."""

"""Patterns of dotted names, such as `blocks.*.up`: what their words can match, and which pattern was meant."""

from __future__ import annotations

import re
from collections.abc import Collection

from fairlead.errors import did_you_mean

_WILD = re.compile(r"[*?\[]")


def literal_words(pattern: str) -> list[str]:
    """The words between dots that have no wildcard and are no index: each has to be a part of a name that matches."""
    return [word for word in pattern.split(".") if word and not word.isdecimal() and not _WILD.search(word)]


def near_pattern(pattern: str, words: Collection[str]) -> str | None:
    """The pattern with its unknown words replaced by the known ones next to them; None where none is near."""
    found = [_nearest(word, words) if word in literal_words(pattern) else word for word in pattern.split(".")]
    near = ".".join(found)
    return near if near != pattern else None


def _nearest(word: str, words: Collection[str]) -> str:
    if word in words:
        return word
    return did_you_mean(word, words) or next((one for one in sorted(words) if _one_key_away(word, one)), word)


def _one_key_away(word: str, other: str) -> bool:
    """Whether one letter is another one, is missing, is too much, or is swapped with the next."""
    if len(word) < 2 or abs(len(word) - len(other)) > 1:
        return False
    if len(word) == len(other):
        at = [i for i, (a, b) in enumerate(zip(word, other, strict=True)) if a != b]
        swapped = len(at) == 2 and at[1] == at[0] + 1 and word[at[0]] == other[at[1]] and word[at[1]] == other[at[0]]
        return len(at) == 1 or swapped
    short, long = sorted((word, other), key=len)
    return any(long[:i] + long[i + 1 :] == short for i in range(len(long)))

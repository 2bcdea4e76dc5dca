"""A reason against an exact resume, and the verdict that several make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Inexact", "Verdict", "sentence", "verdict"]

Verdict = Literal["exact", "not exact", "not known"]


@dataclass(frozen=True, slots=True)
class Inexact:
    """One thing that keeps a resumed run from ending with the same bits, or that may.

    Args:
        what: The thing, with its place: `the IterableDataset Stream in data.py:12`.
        because: Why it is not exact.
        do: What to change.
        certain: False where it may be exact all the same, and nobody can tell.

    Example:
        >>> Inexact("trainer.benchmark: true", "cuDNN may choose other kernels", "benchmark: false").certain
        True
    """

    what: str
    because: str
    do: str
    certain: bool = True


def verdict(reasons: Iterable[Inexact]) -> Verdict:
    """What the reasons amount to; without any, the resume is exact.

    Example:
        >>> verdict([])
        'exact'
        >>> verdict([Inexact("the loader", "it comes from a package that is not read", "start it once", certain=False)])
        'not known'
    """
    certain = [reason.certain for reason in reasons]
    return "not exact" if any(certain) else "not known" if certain else "exact"


def sentence(reason: Inexact) -> str:
    """A reason as `explain` says it.

    Example:
        >>> sentence(Inexact("trainer.benchmark: true", "cuDNN may choose other kernels", "benchmark: false"))
        'not exact, because of trainer.benchmark: true (cuDNN may choose other kernels), do: benchmark: false'
    """
    word = "not exact" if reason.certain else "not known"
    return f"{word}, because of {reason.what} ({reason.because}), do: {reason.do}"

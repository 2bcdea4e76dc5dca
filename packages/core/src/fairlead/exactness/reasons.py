"""A reason against an exact resume, and the verdict that several make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from fairlead.findings import Inexact

__all__ = ["Verdict", "sentence", "verdict"]

Verdict = Literal["exact", "not exact", "not known"]


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
    return f"{word}, because of {reason.what} ({reason.why}), do: {reason.fix}"

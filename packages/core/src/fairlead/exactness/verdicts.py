"""The verdict that several reasons against an exact resume make, and how far it goes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from fairlead.findings import Inexact

Verdict = Literal["exact", "not exact", "not known"]

SCOPE: Final = "settings, loaders and what is in the checkpoint"
"""How far the word `exact` goes, wherever it is said."""
NOT_SEEN: Final = "a state of your own outside of it is not seen (fairlead fit JOB --prove-resume tries it)"


def verdict(reasons: Iterable[Inexact]) -> Verdict:
    """What the reasons amount to; without any, the resume is exact as far as `SCOPE` goes.

    Example:
        >>> verdict([])
        'exact'
        >>> verdict([Inexact("the loader", why="its plugin does not say", fix="ask its authors", certain=False)])
        'not known'
    """
    certain = [reason.certain for reason in reasons]
    return "not exact" if any(certain) else "not known" if certain else "exact"


def sentence(reason: Inexact) -> str:
    """A reason as `explain` says it.

    Example:
        >>> sentence(Inexact("trainer.benchmark: true", why="cuDNN may choose other kernels", fix="benchmark: false"))
        'not exact, because of trainer.benchmark: true (cuDNN may choose other kernels), do: benchmark: false'
    """
    word = "not exact" if reason.certain else "not known"
    return f"{word}, because of {reason.what} ({reason.why}), do: {reason.fix}"

"""What works with what: rows that plugins contribute; a pair without a row is taken to work."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from fairlead.findings import Finding

__all__ = ["Capability", "InstalledPlugins", "check_capabilities"]


@dataclass(frozen=True, slots=True)
class Capability:
    """One row: how well one choice goes with others.

    A choice is named `axis.tag` (`strategy.fsdp`), where the tag may be a preset's
    (`precision.16-mixed`), or `clipping.norm` and `clipping.value` for gradient clipping.

    Args:
        subject: The choice that the row is about.
        others: The choices it is compared with; the row holds for each.
        support: `no` stops a run, `partial` warns, `yes` records that the pair is tested.
        reason: Why; shown to the user.
        fix: What to choose instead.

    Example:
        >>> row = Capability("strategy.deepspeed", ("accelerator.mps",), "no", "it needs CUDA", "strategy: ddp")
        >>> chosen = {"strategy.deepspeed": "trainer.strategy", "accelerator.mps": None}
        >>> [f.code for f in check_capabilities([row], chosen)]
        ['capability']
    """

    subject: str
    others: tuple[str, ...]
    support: Literal["yes", "partial", "no"]
    reason: str
    fix: str | None = None


class InstalledPlugins(Protocol):
    """What the hook `fairlead_capabilities` may ask of the plugin manager."""

    def distinct(self, axis: str) -> Mapping[str, Any]:
        """The plugins of an axis that can be loaded, by tag, without their presets."""


def check_capabilities(rows: Iterable[Capability], chosen: dict[str, str | None]) -> list[Finding]:
    """One finding for each pair among the choices of a run, which are given with the config path that made them."""
    found: dict[tuple[str, frozenset[str]], Finding] = {}  # of a pair the plugins of both may have a row
    for row in rows:
        if row.support != "yes" and row.subject in chosen:
            for other in filter(chosen.__contains__, row.others):
                found.setdefault((row.support, frozenset((row.subject, other))), _finding(row, other, chosen))
    return list(found.values())


def _finding(row: Capability, other: str, chosen: dict[str, str | None]) -> Finding:
    subject, counterpart = _spoken(row.subject), _spoken(other)
    verb = "does not work with" if row.support == "no" else "works only partly with"
    where: Collection[str] = [path for path in (chosen[row.subject], chosen[other]) if path]
    return Finding(
        "error" if row.support == "no" else "warning",
        "capability",
        f"{subject} {verb} {counterpart}",
        where=", ".join(dict.fromkeys(where)) or None,
        why=row.reason,
        fix=row.fix,
    )


def _spoken(choice: str) -> str:
    axis, _, tag = choice.partition(".")
    return f"gradient clipping by {tag}" if axis == "clipping" else f"{axis} {tag!r}"

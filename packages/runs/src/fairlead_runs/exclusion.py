"""Nodes that a run must avoid: recorded in its history, and excluded at the scheduler."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

SCREENS: Final = "screens"
"""The folder in a run directory with what `fairlead doctor --nodes` has found before each start."""
EXCLUDED: Final = "excluded"
"""The event in a history: `nodes`, each with what was wrong with it."""
NOT_EXCLUDED: Final = "not_excluded"
"""The event that takes it back: the scheduler would not have it."""
KEPT: Final = datetime.timedelta(days=7)
"""How long a node counts as bad: by then it is repaired, or its cluster leaves it out by itself."""


@runtime_checkable
class NodeExcluder(Protocol):
    """A requeuer whose scheduler can restart the job without some of its nodes."""

    def requeue_without(self, nodes: Sequence[str]) -> str:
        """As `Requeuer.requeue`, and the job will not get these nodes; what was excluded before stays so.

        What it returns says so where the job was requeued and the nodes could not be excluded.

        Raises:
            RunFailedError: Without them the job could not start, or the scheduler has not requeued it.
        """


def excluded_nodes(events: Sequence[Mapping[str, Any]], now: datetime.datetime | None = None) -> dict[str, str]:
    """The nodes that are excluded in a history, the oldest first, and what was wrong with each.

    Example:
        >>> event = {"event": "excluded", "time": "2026-11-24T10:00:00+00:00", "nodes": {"n2": "matmul: wrong"}}
        >>> excluded_nodes([event], datetime.datetime(2026, 11, 25, tzinfo=datetime.UTC))
        {'n2': 'matmul: wrong'}
    """
    now = datetime.datetime.now(datetime.UTC) if now is None else now
    found: dict[str, str] = {}
    for event in events:
        nodes = event.get("nodes")
        if event["event"] not in (EXCLUDED, NOT_EXCLUDED) or not isinstance(nodes, dict):
            continue
        for node, why in nodes.items():
            found.pop(node, None)
            if event["event"] == EXCLUDED and now - datetime.datetime.fromisoformat(str(event["time"])) < KEPT:
                found[str(node)] = str(why)
    return found

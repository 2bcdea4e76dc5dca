"""Memory, time and goodput of a training job, before it queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairlead_planning.devices import Machines
    from fairlead_planning.planning import Plan, plan
    from fairlead_planning.trace import Work

__all__ = ["Machines", "Plan", "Work", "plan"]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is first used: the command's arguments need none."""
    if name == "Machines":
        from fairlead_planning.devices import Machines

        return Machines
    if name in ("Plan", "plan"):
        from fairlead_planning import planning

        return getattr(planning, name)
    if name == "Work":
        from fairlead_planning.trace import Work

        return Work
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

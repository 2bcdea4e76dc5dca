"""What packages hand each other: plain data, and protocols for what one needs of another."""

from __future__ import annotations

from fairlead.facts import Claim, Devices, Job, Setting, Specificity, Topology
from fairlead.interfaces.building import BuildContext
from fairlead.interfaces.stops import Requeuer, StopGuard, StopSignals

__all__ = [
    "BuildContext",
    "Claim",
    "Devices",
    "Job",
    "Requeuer",
    "Setting",
    "Specificity",
    "StopGuard",
    "StopSignals",
    "Topology",
]

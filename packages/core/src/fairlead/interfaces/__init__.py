"""What packages hand each other: plain data, and protocols for what one needs of another."""

from __future__ import annotations

from fairlead.interfaces.checkpoints import CheckpointCopies, DurableSaves, PlaceTensor, ShardedLoads, ShardedSaves
from fairlead.interfaces.launch import BuildContext, Claim, Devices, Setting, Specificity, Topology
from fairlead.interfaces.stops import OutlivesStops, Requeuer, StopGuard, Stopped, StopSignals

__all__ = [
    "BuildContext",
    "CheckpointCopies",
    "Claim",
    "Devices",
    "DurableSaves",
    "OutlivesStops",
    "PlaceTensor",
    "Requeuer",
    "Setting",
    "ShardedLoads",
    "ShardedSaves",
    "Specificity",
    "StopGuard",
    "StopSignals",
    "Stopped",
    "Topology",
]

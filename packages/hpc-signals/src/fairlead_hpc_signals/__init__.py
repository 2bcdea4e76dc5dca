"""Stopping when a scheduler wants it, with nothing lost, and having the job started again.

`PreemptionGuard` stops any training loop on a signal: all ranks at the same step. The configs are those of the plugins
of the axis `requeue`; a requeuer that is built from one satisfies `fairlead.interfaces.Requeuer`. Nothing here imports
torch but `StopAgreement`, which is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fairlead_hpc_signals.choosing import requeuer_here
from fairlead_hpc_signals.command.config import CommandRequeueConfig
from fairlead_hpc_signals.decision import AgreementError, StopDecision, StopRequest
from fairlead_hpc_signals.exit_code.config import ExitCodeRequeueConfig
from fairlead_hpc_signals.flags import Conflict, Flag, SignalFlags
from fairlead_hpc_signals.lsf.config import LSFRequeueConfig
from fairlead_hpc_signals.none.config import NoneRequeueConfig
from fairlead_hpc_signals.outcomes import StopOutcome, StopPolicy
from fairlead_hpc_signals.reasons import StopReason, why_stopped
from fairlead_hpc_signals.script.config import ScriptRequeueConfig
from fairlead_hpc_signals.slurm.config import SLURMRequeueConfig
from fairlead_hpc_signals.stopping import PreemptionGuard
from fairlead_hpc_signals.workers import OutliveStops

if TYPE_CHECKING:
    from fairlead_hpc_signals.agreement import StopAgreement

__all__ = [
    "AgreementError",
    "CommandRequeueConfig",
    "Conflict",
    "ExitCodeRequeueConfig",
    "Flag",
    "LSFRequeueConfig",
    "NoneRequeueConfig",
    "OutliveStops",
    "PreemptionGuard",
    "SLURMRequeueConfig",
    "ScriptRequeueConfig",
    "SignalFlags",
    "StopAgreement",
    "StopDecision",
    "StopOutcome",
    "StopPolicy",
    "StopReason",
    "StopRequest",
    "requeuer_here",
    "why_stopped",
]


def __getattr__(name: str) -> Any:
    if name == "StopAgreement":
        from fairlead_hpc_signals.agreement import StopAgreement

        return StopAgreement
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

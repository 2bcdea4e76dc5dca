"""Stopping when a scheduler wants it, with nothing lost, and having the job restarted.

The configs are those of the plugins of the axis `requeue`. Nothing here imports torch: a program with several ranks
has done so before.
"""

from __future__ import annotations

from fairlead.facts import StopReason
from fairlead_hpc_signals.agreement import StopAgreement
from fairlead_hpc_signals.command import CommandRequeueConfig
from fairlead_hpc_signals.decision import AgreementError, StopDecision, StopRequest
from fairlead_hpc_signals.exit_code import ExitCodeRequeueConfig
from fairlead_hpc_signals.flags import Conflict, Flag, SignalFlags
from fairlead_hpc_signals.lsf import LSFRequeueConfig
from fairlead_hpc_signals.none import NoneRequeueConfig
from fairlead_hpc_signals.outcomes import StopOutcome, StopPolicy
from fairlead_hpc_signals.programs import CommandSettings
from fairlead_hpc_signals.scheduler import requeuer_here, why_stopped
from fairlead_hpc_signals.scheduler_requeue import SchedulerRequeue, SchedulerRequeuer
from fairlead_hpc_signals.script import ScriptRequeueConfig
from fairlead_hpc_signals.slurm import SLURMRequeueConfig
from fairlead_hpc_signals.stopping import PreemptionGuard
from fairlead_hpc_signals.workers import OutliveStops
from fairlead_runs.guard import Overdue

__all__ = [
    "AgreementError",
    "CommandRequeueConfig",
    "CommandSettings",
    "Conflict",
    "ExitCodeRequeueConfig",
    "Flag",
    "LSFRequeueConfig",
    "NoneRequeueConfig",
    "OutliveStops",
    "Overdue",
    "PreemptionGuard",
    "SLURMRequeueConfig",
    "SchedulerRequeue",
    "SchedulerRequeuer",
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

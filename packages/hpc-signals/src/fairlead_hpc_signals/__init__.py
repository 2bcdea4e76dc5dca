"""Who starts a job again after a preemption: the plugins of the axis `requeue`.

Here are the configs; a requeuer that is built from one satisfies `fairlead.interfaces.Requeuer`.
Nothing in this package imports torch.
"""

from __future__ import annotations

from fairlead_hpc_signals.command.config import CommandRequeueConfig
from fairlead_hpc_signals.exit_code.config import ExitCodeRequeueConfig
from fairlead_hpc_signals.lsf.config import LSFRequeueConfig
from fairlead_hpc_signals.none.config import NoneRequeueConfig
from fairlead_hpc_signals.script.config import ScriptRequeueConfig
from fairlead_hpc_signals.slurm.config import SLURMRequeueConfig

__all__ = [
    "CommandRequeueConfig",
    "ExitCodeRequeueConfig",
    "LSFRequeueConfig",
    "NoneRequeueConfig",
    "SLURMRequeueConfig",
    "ScriptRequeueConfig",
]

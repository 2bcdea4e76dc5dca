"""Who starts this job again, for a loop without a config: what `requeue: auto` chooses in a job file."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fairlead.interfaces import Requeuer
from fairlead_hpc_signals.lsf.config import LSFRequeueConfig
from fairlead_hpc_signals.lsf.plugin import lsf
from fairlead_hpc_signals.lsf.runtime import LSFRequeuer
from fairlead_hpc_signals.script.config import ScriptRequeueConfig
from fairlead_hpc_signals.script.plugin import script
from fairlead_hpc_signals.script.runtime import ScriptRequeuer
from fairlead_hpc_signals.slurm.config import SLURMRequeueConfig
from fairlead_hpc_signals.slurm.plugin import slurm
from fairlead_hpc_signals.slurm.runtime import SLURMRequeuer

__all__ = ["requeuer_here"]


def requeuer_here(environ: Mapping[str, str] | None = None) -> Requeuer | None:
    """The requeuer that the variables of this process speak for, with its usual settings.

    Args:
        environ: The environment variables; None: this process's own.

    Returns:
        None where no scheduler is seen: then the exit code 75 asks whoever started the job.

    Example:
        >>> requeuer_here({}) is None
        True
    """
    environ = os.environ if environ is None else environ
    if script.evidence(environ) is not None:  # whoever sets its variable runs what is written there, and nothing else
        return ScriptRequeuer(ScriptRequeueConfig(), environ)
    if slurm.evidence(environ) is not None:
        return SLURMRequeuer(SLURMRequeueConfig(), environ)
    if lsf.evidence(environ) is not None:
        return LSFRequeuer(LSFRequeueConfig(), environ)
    return None

"""Settings of the environment `slurm`."""

from __future__ import annotations

from typing import Literal

from fairlead_environments.fields import MainAddressConfig

__all__ = ["SLURMEnvironmentConfig"]


class SLURMEnvironmentConfig(MainAddressConfig):
    """Tasks of a SLURM job step: started by `srun`, one task per rank.

    Detected in the tasks of `srun`, and not in a batch script, a shell or a notebook inside an allocation.
    `main_address` is the first node of the step; `main_port` is the first free one of 16 that are derived from job,
    step and restart count.

    Example:
        >>> SLURMEnvironmentConfig(auto_requeue=True).name
        'slurm'
    """

    name: Literal["slurm"] = "slurm"

"""Settings of the environment `lsf`."""

from __future__ import annotations

from typing import Literal

from fairlead_environments.fields import MainAddressConfig

__all__ = ["LSFEnvironmentConfig"]


class LSFEnvironmentConfig(MainAddressConfig):
    """Tasks of an LSF job: started by `jsrun`, or by one `blaunch` over all slots of the job.

    A plain `bsub -n 4 python train.py` runs *one* process, on the first host, so it is not detected
    as LSF; `fairlead check` says so when the job has several hosts. `main_address` is the first
    host that runs tasks; `main_port` is the first free one of 16 that are derived from the job and array index.

    Example:
        >>> LSFEnvironmentConfig(auto_requeue=False).name
        'lsf'
    """

    name: Literal["lsf"] = "lsf"

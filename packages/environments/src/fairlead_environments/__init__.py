"""Where the ranks of a job come from, as Fairlead plugins: the configs, and hiding it. No torch is imported here."""

from __future__ import annotations

from fairlead_environments.kubeflow.config import KubeflowEnvironmentConfig
from fairlead_environments.lightning.config import LightningEnvironmentConfig
from fairlead_environments.lsf.config import LSFEnvironmentConfig
from fairlead_environments.manual.config import ManualEnvironmentConfig
from fairlead_environments.mpi.config import MPIEnvironmentConfig
from fairlead_environments.scrubbing import (
    DEVICE_VARIABLES,
    clean_environment,
    remove_launcher_environment_variables,
    remove_lsf_environment_variables,
    remove_slurm_environment_variables,
)
from fairlead_environments.slurm.config import SLURMEnvironmentConfig
from fairlead_environments.torchelastic.config import TorchElasticEnvironmentConfig
from fairlead_environments.xla.config import XLAEnvironmentConfig

__all__ = [
    "DEVICE_VARIABLES",
    "KubeflowEnvironmentConfig",
    "LSFEnvironmentConfig",
    "LightningEnvironmentConfig",
    "MPIEnvironmentConfig",
    "ManualEnvironmentConfig",
    "SLURMEnvironmentConfig",
    "TorchElasticEnvironmentConfig",
    "XLAEnvironmentConfig",
    "clean_environment",
    "remove_launcher_environment_variables",
    "remove_lsf_environment_variables",
    "remove_slurm_environment_variables",
]

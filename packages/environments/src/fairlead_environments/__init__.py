"""Where the ranks of a job come from, as Fairlead plugins: the configs, and hiding it. No torch is imported here."""

from __future__ import annotations

from fairlead_environments.kubeflow import KubeflowEnvironmentConfig
from fairlead_environments.kubernetes import KubernetesEnvironmentConfig
from fairlead_environments.launchers import DEVICE_VARIABLES
from fairlead_environments.lightning import LightningEnvironmentConfig
from fairlead_environments.lsf import LSFEnvironmentConfig
from fairlead_environments.manual import ManualEnvironmentConfig
from fairlead_environments.mpi import MPIEnvironmentConfig
from fairlead_environments.scrubbing import (
    clean_environment,
    remove_launcher_environment_variables,
    remove_lsf_environment_variables,
    remove_slurm_environment_variables,
)
from fairlead_environments.slurm import SLURMEnvironmentConfig
from fairlead_environments.torchelastic import TorchElasticEnvironmentConfig
from fairlead_environments.xla import XLAEnvironmentConfig

__all__ = [
    "DEVICE_VARIABLES",
    "KubeflowEnvironmentConfig",
    "KubernetesEnvironmentConfig",
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

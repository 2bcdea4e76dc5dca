"""The variables of each launcher: those that belong to a job, and those of the same families that do not.

What a launcher sets is hidden; what a person or a site sets for all jobs stays. Sources: SLURM's man pages (22.05)
and `src/common/env.c`, IBM's reference of LSF 10.1, Open MPI 4.1.4, torch 2.13. Whole families are hidden, because
each release adds to them; what stays is listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, get_args

Launcher = Literal["fairlead", "kubeflow", "kubernetes", "lightning", "lsf", "manual", "mpi", "slurm", "torchrun"]

LAUNCHERS: Final[tuple[Launcher, ...]] = get_args(Launcher)
"""All launchers whose variables are known."""

DEVICE_VARIABLES: Final = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"),
)
"""What a scheduler sets to limit a job to its devices. Kept: what is started *here* has to stay on them."""


class Family(NamedTuple):
    """Patterns of the shell's kind: names to hide, and those among them to keep."""

    hide: tuple[str, ...]
    keep: tuple[str, ...] = ()


_DEFAULTS = ("ACCOUNT", "CLUSTERS", "CONSTRAINT", "PARTITION", "QOS", "RESERVATION", "WCKEY")

_SLURM = Family(
    # _SLURM_SPANK_OPTION_*: options of plugins, such as the outer job's container.
    hide=("SLURM_*", "SLURMD_*", "_SLURM_*", "SRUN_*", "SBATCH_*", "SALLOC_*"),
    keep=(
        # How the commands reach the controller and prove who asks.
        *("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_*"),
        # How the commands print and fail. SQUEUE_*, SINFO_*, SACCT_* and so on are not hidden to begin with.
        *("SLURM_BITSTR_LEN", "SLURM_CONF_OUT", "SLURM_JSON", "SLURM_TIME_FORMAT", "SLURM_TOPO_LEN", "SLURM_YAML"),
        *("SLURM_DEBUG", "SLURM_DEBUG_FLAGS", "SBATCH_DEBUG", "SALLOC_DEBUG"),
        *("SLURM_EXIT_ERROR", "SLURM_EXIT_IMMEDIATE"),
        # Defaults for all jobs: who pays, and where. SLURM never sets these; a job's own are SLURM_JOB_ACCOUNT, ...
        *(f"{command}_{option}" for command in ("SLURM", "SBATCH", "SALLOC") for option in _DEFAULTS),
        *("SBATCH_EXPORT", "SBATCH_GET_USER_ENV", "SRUN_EXPORT_ENV"),  # `sbatch --export` sets SLURM_EXPORT_ENV: hidden
    ),
)

_LSF = Family(
    # LSF_* holds the installation (LSF_ENVDIR, LSF_SERVERDIR, ...), so what is the job's is listed.
    # Not LS_*: LS_COLORS is no variable of LSF.
    hide=(
        *("LSB_*", "JSM_*", "LS_EXEC_T", "LS_JOBPID", "LS_LICENSE_SERVER_*", "LS_SUBCWD", "BSUB_BLOCK"),
        *("LSF_INVOKE_CMD", "LSF_PJL_TYPE", "LSF_PM_*", "LSF_TSOPT_NUM", "LSF_TS_OPTIONS"),
    ),
    keep=(
        *("LSB_CONFDIR", "LSB_LOCALDIR", "LSB_SHAREDIR", "LSB_API_*", "LSB_NTRIES", "LSB_CMD_LOG*", "LSB_DEBUG_CMD"),
        *("LSB_*_FORMAT", "LSB_DISPLAY_YEAR", "LSB_DEFAULT*"),  # LSB_DEFAULTQUEUE, LSB_DEFAULTPROJECT, ...
    ),
)

_MPI = Family(
    hide=(
        *("PMI_*", "PMIX_*", "PALS_*", "PRTE_LAUNCHED"),
        *("OMPI_COMM_WORLD_*", "OMPI_APP_CTX_NUM_PROCS", "OMPI_ARGV", "OMPI_COMMAND", "OMPI_FILE_LOCATION"),
        *("OMPI_FIRST_RANKS", "OMPI_NUM_APP_CTX", "OMPI_UNIVERSE_SIZE"),
        # Parameters that mpirun itself exports; ess=^singleton forbids MPI_Init without mpirun.
        *("OMPI_MCA_ess", "OMPI_MCA_ess_*", "OMPI_MCA_initial_wdir", "OMPI_MCA_mpi_oversubscribe", "OMPI_MCA_orte_*"),
        *("OMPI_MCA_pmix", "OMPI_MCA_shmem_RUNTIME_QUERY_hint"),
        *("HYDI_CONTROL_FD", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME"),
        *("MV2_COMM_WORLD_*", "MPIRUN_*", "MPISPAWN_*"),
    ),
    keep=("OMPI_MCA_orte_rsh_agent", "PMIX_INSTALL_PREFIX", "PMIX_MCA_*", "PMIX_PREFIX"),
)

_RANKS = Family(
    (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NNODES", "MASTER_ADDR", "MASTER_PORT"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    )
)

_PET = Family(("PET_*",))  # options of torchrun, which a nested one would read too

FAMILIES: Final[Mapping[Launcher, tuple[Family, ...]]] = {
    # NSHRUNNER_: where the outer job's own script looks for what to do next; see fairlead_hpc_signals.script.
    "fairlead": (Family(("FAIRLEAD_*", "NSHRUNNER_SUBMIT_*", "NSHRUNNER_LSF_*")), _RANKS),
    "kubeflow": (_PET, _RANKS),
    "kubernetes": (Family(("JOB_COMPLETION_INDEX",)), _RANKS),
    "lightning": (Family(("LT_*",)), _RANKS),  # of `fabric run`
    # srun and jsrun connect their tasks to MPI as well; half of that would claim a rank without a launcher.
    "lsf": (_LSF, _MPI),
    "manual": (_RANKS,),
    "mpi": (_MPI,),
    "slurm": (_SLURM, _MPI),
    "torchrun": (Family(("TORCHELASTIC_*",)), _PET, _RANKS),
}

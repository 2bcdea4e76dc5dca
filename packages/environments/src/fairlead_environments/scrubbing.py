"""Hiding what launchers set, so that a nested launch starts as if from a login node.

With SLURM_JOB_ID a nested `srun` becomes a step of the outer job, with SLURM_CPU_BIND or SLURM_MEM_PER_CPU its tasks
get the outer job's shape or are refused, with RANK and WORLD_SIZE a training waits for ranks that never come.

What a launcher sets is hidden; what a person or a site sets for all jobs is kept. Sources: SLURM's man pages (22.05)
and `src/common/env.c`, IBM's reference of LSF 10.1, Open MPI 4.1.4, torch 2.13. Whole families are hidden, because
each release adds to them; what is kept is listed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ContextDecorator
from dataclasses import dataclass, field
from fnmatch import translate
from threading import RLock
from types import MappingProxyType
from typing import Final, Literal, get_args

from fairlead.errors import ConfigError, did_you_mean

__all__ = [
    "DEVICE_VARIABLES",
    "LAUNCHERS",
    "HiddenVariables",
    "Launcher",
    "clean_environment",
    "remove_launcher_environment_variables",
    "remove_lsf_environment_variables",
    "remove_slurm_environment_variables",
]

Launcher = Literal["fairlead", "kubeflow", "lightning", "lsf", "manual", "mpi", "slurm", "torchrun"]

LAUNCHERS: Final[tuple[Launcher, ...]] = get_args(Launcher)
"""All launchers whose variables are known."""

DEVICE_VARIABLES: Final = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"),
)
"""What a scheduler sets to limit a job to its devices. Kept: what is started *here* has to stay on them."""


@dataclass(frozen=True)
class _Family:
    """Patterns of the shell's kind: names to hide, and those among them to keep."""

    hide: tuple[str, ...]
    keep: tuple[str, ...] = ()


_DEFAULTS = ("ACCOUNT", "CLUSTERS", "CONSTRAINT", "PARTITION", "QOS", "RESERVATION", "WCKEY")

_SLURM = _Family(
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

_LSF = _Family(
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

_MPI = _Family(
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

_RANKS = _Family(
    (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NNODES", "MASTER_ADDR", "MASTER_PORT"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    )
)

_PET = _Family(("PET_*",))  # options of torchrun, which a nested one would read too

_FAMILIES: Final[Mapping[Launcher, tuple[_Family, ...]]] = {
    # NSHRUNNER_: where the outer job's own script looks for what to do next; see fairlead_hpc_signals.script.
    "fairlead": (_Family(("FAIRLEAD_*", "NSHRUNNER_SUBMIT_*", "NSHRUNNER_LSF_*")), _RANKS),
    "kubeflow": (_PET, _RANKS),
    "lightning": (_Family(("LT_*",)), _RANKS),  # of `fabric run`
    # srun and jsrun connect their tasks to MPI as well; half of that would claim a rank without a launcher.
    "lsf": (_LSF, _MPI),
    "manual": (_RANKS,),
    "mpi": (_MPI,),
    "slurm": (_SLURM, _MPI),
    "torchrun": (_Family(("TORCHELASTIC_*",)), _PET, _RANKS),
}

_Hides = Callable[[str], bool]


def _matches(patterns: Iterable[str]) -> _Hides:
    patterns = (patterns,) if isinstance(patterns, str) else patterns  # a lone name is no list of letters
    expression = re.compile("|".join(map(translate, patterns)) or r"(?!)")
    return lambda name: expression.match(name) is not None


def _hides(launchers: tuple[Launcher, ...], keep: Iterable[str], also: Iterable[str]) -> _Hides:
    """Tells which names to hide; a launcher that is not known is a ConfigError."""
    for launcher in launchers:
        if launcher not in LAUNCHERS:
            near = did_you_mean(str(launcher), LAUNCHERS)
            fix = f"write {near!r}" if near else f"name one of {', '.join(LAUNCHERS)}"
            raise ConfigError(f"unknown launcher {launcher!r}", where="launchers", fix=fix)
    kept, more = _matches(keep), _matches(also)
    families = {family for launcher in launchers or LAUNCHERS for family in _FAMILIES[launcher]}
    rules = [(_matches(family.hide), _matches(family.keep)) for family in families]
    return lambda name: not kept(name) and (more(name) or any(hide(name) and not keep(name) for hide, keep in rules))


def clean_environment(
    environ: Mapping[str, str], *launchers: Launcher, keep: Iterable[str] = (), also: Iterable[str] = ()
) -> dict[str, str]:
    """A copy of environment variables without those of launchers, for `subprocess.run(env=...)`.

    Args:
        environ: The variables, such as `os.environ`. Not changed.
        launchers: Whose variables to leave out; all of `LAUNCHERS` when none is named.
        keep: Names to keep all the same; `*` and `?` stand for other characters.
        also: More names to leave out, such as `DEVICE_VARIABLES`.

    Raises:
        ConfigError: A launcher is not known.

    Example:
        >>> clean_environment({"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm.conf", "RANK": "3"})
        {'PATH': '/bin', 'SLURM_CONF': '/etc/slurm.conf'}
    """
    hides = _hides(launchers, keep, also)
    return {name: value for name, value in environ.items() if not hides(name)}


@dataclass(eq=False)
class _Block:
    hides: _Hides
    saved: dict[str, str] = field(default_factory=dict)


_open: Final[list[_Block]] = []  # in the order of entering; os.environ is one for all threads, and so is this
_lock: Final = RLock()


class HiddenVariables(ContextDecorator):
    """Hides variables from `os.environ` in a block; made by the functions `remove_..._environment_variables`."""

    def __init__(self, hides: Callable[[str], bool]) -> None:
        self._hides = hides
        self._blocks: list[_Block] = []

    def __enter__(self) -> Mapping[str, str]:
        """Hides them, and returns what was hidden."""
        with _lock:
            block = _Block(self._hides, {name: value for name, value in os.environ.items() if self._hides(name)})
            for name in block.saved:
                os.environ.pop(name, None)
            _open.append(block)
            self._blocks.append(block)
        return MappingProxyType(dict(block.saved))

    def __exit__(self, *_: object) -> None:
        """Puts each of them back as it was."""
        with _lock:
            block = self._blocks.pop()
            place = _open.index(block)
            later = _open[place + 1 :]
            del _open[place]
            names = set(block.saved)
            for store in (os.environ, *(other.saved for other in later)):
                names.update(filter(block.hides, store))
            for name in names:
                # A block of another thread may have been entered since: it is to put the variable back, not we.
                store = next((other.saved for other in later if other.hides(name)), os.environ)
                if name in block.saved:
                    store[name] = block.saved[name]
                else:
                    store.pop(name, None)


def remove_launcher_environment_variables(
    *launchers: Launcher, keep: Iterable[str] = (), also: Iterable[str] = ()
) -> HiddenVariables:
    """A block, or a decorated function, in which `os.environ` has no variables of launchers.

    After it, also after an exception, all variables of these launchers are exactly as before: those that
    the block set are gone, those that it changed have their old value. Other variables stay as the block left
    them. `os.environ` belongs to all threads; where others read it meanwhile, use `clean_environment`.
    A decorated function is to be an ordinary one: of a coroutine or generator, only the making is inside.

    Args:
        launchers: Whose variables to hide; all of `LAUNCHERS` when none is named.
        keep: Names to leave alone all the same; `*` and `?` stand for other characters.
        also: More names to hide, such as `DEVICE_VARIABLES`.

    Raises:
        ConfigError: A launcher is not known.

    Example:
        >>> with remove_launcher_environment_variables() as hidden:
        ...     any(name in os.environ for name in hidden)
        False
    """
    return HiddenVariables(_hides(launchers, keep, also))


def remove_slurm_environment_variables(*, keep: Iterable[str] = (), also: Iterable[str] = ()) -> HiddenVariables:
    """`remove_launcher_environment_variables("slurm")`: the job's, the step's and its MPI's variables (R78).

    What SLURM's commands need (SLURM_CONF, SLURM_JWT) stays, and so do a person's defaults (SBATCH_ACCOUNT).

    Example:
        >>> with remove_slurm_environment_variables():  # doctest: +SKIP
        ...     subprocess.run(["sbatch", "evaluate.sh"], check=True)
    """
    return remove_launcher_environment_variables("slurm", keep=keep, also=also)


def remove_lsf_environment_variables(*, keep: Iterable[str] = (), also: Iterable[str] = ()) -> HiddenVariables:
    """`remove_launcher_environment_variables("lsf")`: the job's, jsrun's, blaunch's and their MPI's variables (R79).

    What LSF's commands need (LSF_ENVDIR, EGO_TOP) stays, and so do a person's defaults (LSB_DEFAULTQUEUE).

    Example:
        >>> with remove_lsf_environment_variables():  # doctest: +SKIP
        ...     subprocess.run(["bsub", "./evaluate.sh"], check=True)
    """
    return remove_launcher_environment_variables("lsf", keep=keep, also=also)

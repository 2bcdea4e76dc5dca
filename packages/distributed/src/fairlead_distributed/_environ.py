"""The numbers that a launcher gives this process in its environment; nothing is connected.

SLURM's are read here too, so that a script with torch alone gets its rank under `srun` without any plugin. Those of
other launchers, such as mpirun, the installed environment plugins read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from fairlead.detect import choose_environment
from fairlead.errors import ConfigError
from fairlead.plugins import default_plugins


def or_process(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    """The given mapping, or this process's own environment: looked up here alone."""
    return os.environ if environ is None else environ


def integer(environ: Mapping[str, str], name: str) -> int | None:
    """A variable as a non-negative integer, None where it is not set or empty."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"the environment variable {name} is not a number: {text!r}",
            where=f"environment, {name}",
            fix=f"set {name} to an integer that is 0 or larger, or unset it",
        )
    return int(text)


def _slurm(environ: Mapping[str, str]) -> tuple[int, int] | None:
    # A batch script and an salloc shell carry SLURM_NTASKS (and the script SLURM_PROCID=0) though they are one
    # process: only a *step*, started by srun, has a step id.
    in_step = "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ or "SLURM_JOB_ID" not in environ
    rank = integer(environ, "SLURM_PROCID")
    names = ("SLURM_NPROCS", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")
    world_size = next((n for name in names if (n := integer(environ, name)) is not None), None)
    if not in_step or rank is None or world_size is None:
        return None
    return rank, world_size


def _variables(environ: Mapping[str, str]) -> tuple[int, int] | None:
    rank, world_size = integer(environ, "RANK"), integer(environ, "WORLD_SIZE")
    if (rank is None) != (world_size is None):
        there, absent = ("WORLD_SIZE", "RANK") if rank is None else ("RANK", "WORLD_SIZE")
        raise ConfigError(
            f"{there} is set and {absent} is not",
            where="environment",
            why="every process of a group needs both",
            fix=f"set {absent}, or start the script with torchrun or srun, which set both",
        )
    return None if rank is None or world_size is None else (rank, world_size)


def _source(environ: Mapping[str, str]) -> tuple[Literal["slurm", "variables", "none"], int, int]:
    slurm = _slurm(environ)
    # torchrun inside an srun task is the inner launcher, and any launcher inside a step of one task is: there SLURM's
    # numbers count the launchers, not the workers.
    inner_wins = slurm is None or "TORCHELASTIC_RUN_ID" in environ or slurm[1] == 1
    variables = _variables(environ) if inner_wins else None
    if variables is not None:
        return "variables", *variables
    if slurm is not None:
        return "slurm", *slurm
    return "none", 0, 1


def rank_and_world_size(environ: Mapping[str, str]) -> tuple[int, int]:
    """`(rank, world_size)`: of the SLURM step, else RANK and WORLD_SIZE, else (0, 1)."""
    source, rank, world_size = _source(environ)
    names = "SLURM_PROCID and SLURM_NTASKS" if source == "slurm" else "RANK and WORLD_SIZE"
    return checked(rank, world_size, f"environment, {names}")


def checked(rank: int, world_size: int, where: str) -> tuple[int, int]:
    """Both, if the one fits into the other."""
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank {rank} does not fit into a world of {world_size} processes",
            where=where,
            why="ranks go from 0 to the world size minus 1",
        )
    return rank, world_size


class Launched(NamedTuple):
    """The numbers of a launcher that an installed plugin knows."""

    rank: int
    world_size: int
    local_rank: int | None


def by_plugins(environ: Mapping[str, str]) -> Launched | None:
    """What an environment plugin says, where neither SLURM nor RANK and WORLD_SIZE do; takes milliseconds."""
    if _source(environ)[0] != "none":
        return None
    topology = choose_environment("auto", environ, default_plugins(), starting=True).topology
    if topology is None or not topology.launched or topology.global_rank is None or topology.world_size is None:
        return None
    local = topology.local_rank
    return Launched(topology.global_rank.value, topology.world_size.value, local.value if local is not None else None)


def local_rank(environ: Mapping[str, str]) -> int | None:
    """This process's number on its own machine, None where the launcher does not say."""
    if _source(environ)[0] == "slurm":
        return integer(environ, "SLURM_LOCALID")
    given = integer(environ, "LOCAL_RANK")
    launched = by_plugins(environ) if given is None else None
    return launched.local_rank if launched is not None else given


def restart_count(environ: Mapping[str, str]) -> int:
    """How often torchrun has restarted the workers; 0 without torchrun."""
    return integer(environ, "TORCHELASTIC_RESTART_COUNT") or 0


CHECK_COLLECTIVES: Final = "FAIRLEAD_CHECK_COLLECTIVES"
_CHECKED_CALLS: Final = 20


def checked_calls(environ: Mapping[str, str]) -> float:
    """How many calls of each group are checked: FAIRLEAD_CHECK_COLLECTIVES=all, off, or a number; 20 by default."""
    text = environ.get(CHECK_COLLECTIVES, "").strip().lower()
    if text in ("", "all", "off"):
        return {"": _CHECKED_CALLS, "all": math.inf, "off": 0}[text]
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"{CHECK_COLLECTIVES} is {text!r}",
            where=f"environment, {CHECK_COLLECTIVES}",
            fix="set it to all, to off, or to the number of calls of each group that are to be checked",
        )
    return int(text)

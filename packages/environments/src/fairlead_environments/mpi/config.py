"""Settings of the environment `mpi`."""

from __future__ import annotations

from typing import Literal

from fairlead_environments.fields import MainAddressConfig

__all__ = ["MPIEnvironmentConfig"]


class MPIEnvironmentConfig(MainAddressConfig):
    """Processes that `mpirun` or `mpiexec` started: Open MPI, MPICH, Intel MPI, MVAPICH.

    Detection reads variables only and never calls MPI_Init. MPI's launchers do not say on which
    host rank 0 is; on several nodes `main_address` comes from the scheduler or from Open MPI's
    contact address, else it has to be set, or asked of MPI itself with `use_mpi4py`.

    Example:
        >>> MPIEnvironmentConfig(main_address="n1").use_mpi4py
        False
    """

    name: Literal["mpi"] = "mpi"
    use_mpi4py: bool = False
    """Ask MPI for ranks, nodes, address and a free port when the run starts: calls MPI_Init, needs mpi4py."""

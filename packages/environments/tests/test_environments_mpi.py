"""MPI launchers, without MPI.

The Open MPI 4 variables are those of Debian's 4.1.4; hydra's and MVAPICH's are fakes after their
documentation.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fairlead import FairleadError, Topology
from fairlead.detect import ChosenEnvironment
from fairlead_environments import MPIEnvironmentConfig
from fairlead_environments.mpi import mpi
from fairlead_environments.mpi_runtime import exchange
from fairlead_environments.runtime import ResolvedEnvironment

Choose = Callable[[Mapping[str, str]], ChosenEnvironment]
Recorded = Callable[[str], dict[str, str]]
Ranks = Callable[[Topology], tuple[object, ...]]

CONFIG = MPIEnvironmentConfig()


def openmpi(rank: int, size: int, local_rank: int, local_size: int, **more: str) -> dict[str, str]:
    """A rank of Open MPI 4."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(local_rank),
        "PMIX_RANK": str(rank),
        "PMIX_NAMESPACE": "2358968321",
        **more,
    }


CONTACT = {"OMPI_MCA_orte_hnp_uri": "2358968320.0;tcp://127.0.0.1,10.148.0.1,10.108.0.1:34911"}


@pytest.mark.parametrize(
    ("environ", "expected", "address"),
    [
        (openmpi(1, 2, 1, 2), (1, 2, 2, 0, 1, 1), "127.0.0.1"),
        (openmpi(3, 4, 1, 2, **CONTACT), (2, 2, 4, 1, 1, 3), "10.148.0.1"),
        (openmpi(1, 4, 0, 2, **CONTACT), (2, 2, 4, 1, 0, 1), "10.148.0.1"),  # --map-by node
        (openmpi(3, 4, 1, 2, SLURM_JOB_NODELIST="n[7-8]", **CONTACT), (2, 2, 4, 1, 1, 3), "n7"),
        (openmpi(3, 4, 1, 2, MASTER_ADDR="a"), (2, 2, 4, 1, 1, 3), "a"),
        (openmpi(3, 4, 0, 1, MASTER_ADDR="a"), (4, 1, 4, 3, 0, 3), "a"),
        (
            {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "MASTER_ADDR": "a"},
            (2, 4, 8, 1, 1, 5),
            "a",
        ),
        (
            {
                f"MV2_COMM_WORLD_{k}": v
                for k, v in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()
            },
            (1, 2, 2, 0, 1, 1),
            "127.0.0.1",
        ),
    ],
)
def test_launchers(
    environ: dict[str, str], expected: tuple[object, ...], address: str, choose: Choose, ranks: Ranks
) -> None:
    """Open MPI, hydra and MVAPICH are found by their variables."""
    chosen = choose(environ)
    assert chosen.setting.value == "mpi"
    assert not chosen.findings
    assert chosen.topology is not None
    assert ranks(chosen.topology) == expected
    assert chosen.topology.main_address is not None
    assert chosen.topology.main_address.value == address
    assert chosen.topology.main_port is not None


def test_srun_with_pmi_or_pmix_is_slurm(recorded: Recorded, choose: Choose) -> None:
    """The PMI_ and PMIX_ variables of `srun --mpi=` are SLURM's."""
    for name in ("slurm/srun.pmix.1", "slurm/sbatch.srun-gpt.1"):
        claims = choose(recorded(name)).claims
        assert "mpi" not in claims


def test_ranks_on_nodes_that_nothing_names_are_an_error_not_a_hang(choose: Choose) -> None:
    chosen = choose(openmpi(3, 4, 1, 2))
    assert [f.severity for f in chosen.findings] == ["error"]
    assert "the host of rank 0 is not known" in chosen.findings[0].what
    assert "use_mpi4py" in str(chosen.findings[0].fix)


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-n1-7@1"}, "this launcher sets PMIX_RANK only"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "MPI_LOCALRANKID is not set"),
        (openmpi(4, 4, 0, 2, MASTER_ADDR="a"), "4 (OMPI_COMM_WORLD_RANK) does not go with 4 (OMPI_COMM_WORLD_SIZE)"),
        ({**openmpi(1, 4, 0, 4), "OMPI_COMM_WORLD_SIZE": "four"}, "OMPI_COMM_WORLD_SIZE is 'four'"),
        ({}, "no MPI launcher started this process"),
    ],
)
def test_what_is_absent_or_malformed_is_named(environ: dict[str, str], told: str) -> None:
    with pytest.raises(FairleadError) as raised:
        mpi.fairlead_topology(CONFIG, environ)
    assert told in raised.value.what
    assert raised.value.fix


def test_with_mpi4py_what_variables_do_not_say_is_left_to_mpi() -> None:
    config = MPIEnvironmentConfig(use_mpi4py=True)
    found = mpi.fairlead_topology(config, {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-n1-7@1"})
    assert found.launched
    assert (found.world_size, found.main_address, found.main_port) == (None, None, None)


def test_detection_never_imports_mpi4py() -> None:
    """FIELD.md, pain 14: with an mpi4py that may not be imported, detection and topology work."""
    code = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "from fairlead import PluginManager; from fairlead.detect import choose_environment\n"
        f"chosen = choose_environment('auto', {openmpi(0, 2, 0, 2)!r}, PluginManager())\n"
        "assert not {'torch', 'lightning', 'mpi4py.MPI'} & set(sys.modules)\n"
        "print(chosen.setting.value, *chosen.findings)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "mpi\n"


class FakeWorld:
    """A stand-in for COMM_WORLD: `allgather` over threads."""

    def __init__(self, rank: int, offers: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.offers, self.barrier = rank, offers, barrier

    def Get_rank(self) -> int:  # noqa: N802 - mpi4py's name
        return self.rank

    def allgather(self, offer: Any) -> list[Any]:
        self.offers[self.rank] = offer
        self.barrier.wait(timeout=30)
        return self.offers


def test_mpi_itself_tells_ranks_nodes_and_the_meeting_point() -> None:
    """`use_mpi4py`: four ranks that go round two nodes, which no variable would show."""
    hosts = ["b", "a", "b", "a"]
    offers: list[Any] = [None] * 4
    barrier = threading.Barrier(4)
    found: dict[int, ResolvedEnvironment] = {}

    def ask(rank: int) -> None:
        config = MPIEnvironmentConfig(use_mpi4py=True)
        found[rank] = exchange(config, FakeWorld(rank, offers, barrier), hosts[rank])

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = [
        (found[r].world_size(), found[r].global_rank(), found[r].node_rank(), found[r].local_rank()) for r in range(4)
    ]
    assert seen == [(4, 0, 0, 0), (4, 1, 1, 0), (4, 2, 0, 1), (4, 3, 1, 1)]
    assert {e.main_address for e in found.values()} == {"b"}
    assert len({e.main_port for e in found.values()}) == 1

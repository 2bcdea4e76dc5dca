"""One real SLURM of four nodes for all tests here."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from integration_tests.exact.cases import warm
from integration_tests.exact.references import References
from integration_tests.slurm.cluster import Cluster
from integration_tests.slurm.plan import Options
from integration_tests.slurm.system import MissingProgramError


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes of four CPUs and two fake GPUs; it goes when the tests do."""
    options = Options(nodes=4, cpus=4, gpus=2, watch=os.getpid())
    try:
        up = Cluster(tmp_path_factory.mktemp("slurm")).up(options)
    except MissingProgramError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    with up:
        yield up


@pytest.fixture(autouse=True)
def idle_again(cluster: Cluster) -> Iterator[None]:
    """No job of one test is there when the next one begins."""
    yield
    cluster.cancel_all()


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Undisturbed runs on this machine, without SLURM."""
    return References(tmp_path_factory.mktemp("undisturbed"), warm)

"""Kubeflow. No cluster can be had here: the environments are fakes written after the operators' sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from fairlead import FairleadError, Topology
from fairlead.detect import ChosenEnvironment
from fairlead_environments.kubeflow import KubeflowEnvironmentConfig, kubeflow

Choose = Callable[[Mapping[str, str]], ChosenEnvironment]
Ranks = Callable[[Topology], tuple[object, ...]]

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_PORT": "tcp://10.96.0.1:443"}
MASTER = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


def fake_pytorchjob(rank: int, world_size: int, **more: str) -> dict[str, str]:
    """A fake pod of a PyTorchJob; RANK is the pod's."""
    return {**POD, **MASTER, "RANK": str(rank), "WORLD_SIZE": str(world_size), "PYTHONUNBUFFERED": "1", **more}


def fake_trainjob(rank: int, nodes: str, per_node: str) -> dict[str, str]:
    """A fake pod of a TrainJob."""
    return {
        **POD,
        "PET_NNODES": nodes,
        "PET_NPROC_PER_NODE": per_node,
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "job-node-0-0.job",
        "PET_MASTER_PORT": "29500",
    }


@pytest.mark.parametrize(
    ("environ", "launched", "expected"),
    [
        # Before release 1.7, and where nprocPerNode is not passed: WORLD_SIZE counts pods.
        (fake_pytorchjob(1, 4), False, (4, None, None, 1, None, None)),
        # nprocPerNode: "auto", the default: torchrun, or Fairlead, counts the devices.
        (
            fake_pytorchjob(1, 4, PET_NPROC_PER_NODE="auto", PET_NODE_RANK="1", PET_NNODES="4"),
            False,
            (4, None, None, 1, None, None),
        ),
        # nprocPerNode: "8": WORLD_SIZE counts ranks.
        (
            fake_pytorchjob(3, 32, PET_NPROC_PER_NODE="8", PET_NODE_RANK="3", PET_NNODES="4"),
            False,
            (4, 8, 32, 3, None, None),
        ),
        (fake_pytorchjob(3, 32, PET_NPROC_PER_NODE="8", PET_NODE_RANK="3"), False, (4, 8, 32, 3, None, None)),
        (fake_pytorchjob(1, 2, PET_NPROC_PER_NODE="1", PET_NNODES="2"), True, (2, 1, 2, 1, 0, 1)),
        (fake_trainjob(2, "3", "4"), False, (3, 4, 12, 2, None, None)),
        (fake_trainjob(2, "3", "1"), True, (3, 1, 3, 2, 0, 2)),
        (fake_trainjob(0, "2:2", "gpu"), False, (2, None, None, 0, None, None)),
    ],
)
def test_pods(
    environ: dict[str, str], launched: bool, expected: tuple[object, ...], choose: Choose, ranks: Ranks
) -> None:
    """Both kinds of job, one or several GPUs per pod, detected without configuration."""
    chosen = choose(environ)
    assert chosen.setting.value == "kubeflow"
    assert not chosen.findings
    assert chosen.topology is not None
    assert chosen.topology.launched is launched
    assert ranks(chosen.topology) == expected


def test_ranks_that_fairlead_started_in_a_pod_know_themselves(ranks: Ranks) -> None:
    environ = {
        **fake_pytorchjob(1, 8, PET_NPROC_PER_NODE="4", PET_NNODES="2"),
        "FAIRLEAD_LAUNCHED": "1",
        "RANK": "6",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
        "NODE_RANK": "1",
    }
    found = kubeflow.fairlead_topology(KubeflowEnvironmentConfig(), environ)
    assert found.launched
    assert ranks(found) == (2, 4, 8, 1, 2, 6)


def test_torchrun_in_a_pod_is_torchrun(choose: Choose) -> None:
    environ = {
        **fake_trainjob(1, "2", "2"),
        "TORCHELASTIC_RUN_ID": "job",
        "RANK": "2",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "job-node-0-0",
        "MASTER_PORT": "29500",
    }
    assert choose(environ).setting.value == "torchelastic"


def test_any_other_pod_is_not_kubeflow(choose: Choose) -> None:
    """A notebook in Kubernetes is one machine."""
    assert choose(POD).setting.value == "lightning"


def test_the_same_variables_outside_of_kubernetes_are_by_hand(choose: Choose) -> None:
    environ = {k: v for k, v in fake_pytorchjob(1, 4, LOCAL_RANK="0").items() if k not in POD}
    assert choose(environ).setting.value == "manual"


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        (fake_trainjob(0, "2:4", "1"), "PET_NNODES is '2:4': the number of pods may change"),
        (fake_trainjob(0, "two", "1"), "PET_NNODES is 'two'"),
        (fake_trainjob(2, "2", "1"), "does not go with 2"),
        (fake_trainjob(0, "2", "none"), "PET_NPROC_PER_NODE is 'none'"),
        (fake_pytorchjob(0, 9, PET_NPROC_PER_NODE="8"), "WORLD_SIZE is '9', which is not a multiple of"),
        ({**fake_pytorchjob(0, 2), "MASTER_PORT": "tcp"}, "MASTER_PORT is 'tcp'"),
    ],
)
def test_what_is_malformed_is_named(environ: dict[str, str], told: str) -> None:
    with pytest.raises(FairleadError) as raised:
        kubeflow.fairlead_topology(KubeflowEnvironmentConfig(), environ)
    assert told in raised.value.what
    assert raised.value.where

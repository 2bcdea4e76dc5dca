"""Indexed Jobs. No cluster can be had here: the environments are fakes, written after Kubernetes' documentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from fairlead import FairleadError, PluginManager, Topology
from fairlead.checks import check_trainer
from fairlead.config import TrainerConfig
from fairlead.detect import ChosenEnvironment
from fairlead_environments.kubernetes import KubernetesEnvironmentConfig, kubernetes

Choose = Callable[[Mapping[str, str]], ChosenEnvironment]
Ranks = Callable[[Topology], tuple[object, ...]]

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_PORT": "tcp://10.96.0.1:443", "HOSTNAME": "sine-1"}


def fake_pod(index: int, **more: str) -> dict[str, str]:
    """A fake pod of an Indexed Job: Kubernetes sets the index, the manifest the rest."""
    return {**POD, "JOB_COMPLETION_INDEX": str(index), "MASTER_ADDR": "sine-0.sine", "MASTER_PORT": "29500", **more}


@pytest.mark.parametrize(
    ("environ", "launched", "expected"),
    [
        # As `fairlead submit` writes it, with several devices in each pod, and with one.
        (fake_pod(1, WORLD_SIZE="8", LOCAL_WORLD_SIZE="4"), False, (2, 4, 8, 1, None, None)),
        (fake_pod(1, WORLD_SIZE="2", LOCAL_WORLD_SIZE="1"), True, (2, 1, 2, 1, 0, 1)),
        # As people write it: the pods, or all ranks, and `devices` in the job says the rest.
        (fake_pod(2, NNODES="3"), False, (3, None, None, 2, None, None)),
        (fake_pod(2, NNODES="3", LOCAL_WORLD_SIZE="2"), False, (3, 2, 6, 2, None, None)),
        (fake_pod(0, WORLD_SIZE="16"), False, (None, None, 16, 0, None, None)),
        (fake_pod(1, WORLD_SIZE="8", NNODES="2"), False, (2, 4, 8, 1, None, None)),
        # With RANK beside them these are the variables of a PyTorchJob, whose pods have no index.
        (fake_pod(1, NNODES="2", WORLD_SIZE="2", RANK="1"), True, (2, 1, 2, 1, 0, 1)),
    ],
)
def test_the_index_of_a_pod_is_the_rank_of_its_node(
    environ: dict[str, str], launched: bool, expected: tuple[object, ...], choose: Choose, ranks: Ranks
) -> None:
    chosen = choose(environ)
    assert (chosen.setting.value, chosen.findings) == ("kubernetes", ())
    assert chosen.topology is not None
    assert chosen.topology.launched is launched
    assert ranks(chosen.topology) == expected
    assert chosen.topology.main_address is not None
    assert chosen.topology.main_address.value == "sine-0.sine"


def test_the_ranks_of_a_pod_know_themselves(choose: Choose, ranks: Ranks) -> None:
    """Those that Fairlead starts in it have torchrun's variables too."""
    mine = {"RANK": "6", "LOCAL_RANK": "2", "NODE_RANK": "1", "NNODES": "2", "FAIRLEAD_LAUNCHED": "1"}
    chosen = choose(fake_pod(1, WORLD_SIZE="8", LOCAL_WORLD_SIZE="4", **mine))
    assert chosen.setting.value == "kubernetes"
    assert chosen.topology is not None
    assert ranks(chosen.topology) == (2, 4, 8, 1, 2, 6)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (POD, "lightning"),  # a notebook
        ({**POD, "JOB_COMPLETION_INDEX": "3"}, "lightning"),  # an Indexed Job of runs apart
        ({**POD, "JOB_COMPLETION_INDEX": "", "MASTER_ADDR": "127.0.0.1"}, "lightning"),
        ({"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "a", "NODE_RANK": "1", "NNODES": "2"}, "manual"),  # no pod
        # A TrainJob's pods are those of an Indexed Job as well.
        (fake_pod(1, PET_NNODES="2", PET_NODE_RANK="1", PET_MASTER_ADDR="sine-node-0-0.sine"), "kubeflow"),
    ],
)
def test_other_pods_are_not_claimed(environ: dict[str, str], expected: str, choose: Choose) -> None:
    assert "kubernetes" not in choose(environ).claims
    assert expected in choose(environ).claims


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        (fake_pod(0, NNODES="2", MASTER_ADDR=""), "MASTER_ADDR is not set"),
        (fake_pod(0), "WORLD_SIZE is not set"),
        (fake_pod(2, NNODES="2"), "does not go with 2"),
        (fake_pod(0, WORLD_SIZE="9", LOCAL_WORLD_SIZE="4"), "WORLD_SIZE is 9, which is not a multiple of"),
        ({**fake_pod(0, NNODES="2"), "JOB_COMPLETION_INDEX": "first"}, "JOB_COMPLETION_INDEX is 'first'"),
    ],
)
def test_a_manifest_that_lacks_something_is_told_so(environ: dict[str, str], told: str) -> None:
    with pytest.raises(FairleadError) as raised:
        kubernetes.fairlead_topology(KubernetesEnvironmentConfig(), environ)
    assert told in raised.value.what
    assert raised.value.where
    assert raised.value.fix


@pytest.mark.parametrize(("devices", "said"), [(4, []), (2, ["world-size-contradicted"])])
def test_world_size_has_to_fit_the_devices_of_a_pod(devices: int, said: list[str], plugins: PluginManager) -> None:
    """The manifest counts four ranks in each pod."""
    environ = fake_pod(1, WORLD_SIZE="8", LOCAL_WORLD_SIZE="4")
    config = TrainerConfig.model_validate({"accelerator": "cpu", "devices": devices}, context={"plugins": plugins})
    resolution, found = check_trainer(config, environ=environ, plugins=plugins)
    assert [one.code for one in found if one.severity == "error"] == said
    assert resolution.num_nodes == 2

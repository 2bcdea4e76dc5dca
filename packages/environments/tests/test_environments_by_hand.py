"""`manual`, `lightning`, `torchelastic` and `xla`: variables set by a person, an agent, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from fairlead import FairleadError, PluginManager, Topology
from fairlead.detect import ChosenEnvironment
from fairlead_environments import (
    LightningEnvironmentConfig,
    ManualEnvironmentConfig,
    TorchElasticEnvironmentConfig,
    XLAEnvironmentConfig,
)
from fairlead_environments.lightning import lightning
from fairlead_environments.manual import manual
from fairlead_environments.torchelastic import torchelastic
from fairlead_environments.xla import xla

Choose = Callable[[Mapping[str, str]], ChosenEnvironment]
Ranks = Callable[[Topology], tuple[object, ...]]


def variables(text: str) -> dict[str, str]:
    """`A=1 B=2` as a mapping."""
    return dict(word.split("=", 1) for word in text.split())


# name, variables, environment, launched, (nodes, ranks here, ranks in all, node rank, local rank, global rank)
HAND = [
    ("nothing", "", "lightning", False, (1, None, None, 0, None, None)),
    ("node", "MASTER_ADDR=a NODE_RANK=1", "manual", False, (None, None, None, 1, None, None)),
    ("nodes", "MASTER_ADDR=a NODE_RANK=1 NNODES=4", "manual", False, (4, None, None, 1, None, None)),
    ("ranks of nodes", "MASTER_ADDR=a NODE_RANK=1 NNODES=2 WORLD_SIZE=8", "manual", False, (2, 4, 8, 1, None, None)),
    ("rank", "MASTER_ADDR=a RANK=3 WORLD_SIZE=4 LOCAL_RANK=1", "manual", True, (None, None, 4, None, 1, 3)),
    (
        "rank of a node",
        "MASTER_ADDR=a NODE_RANK=1 LOCAL_RANK=1 WORLD_SIZE=4 NNODES=2",
        "manual",
        True,
        (2, 2, 4, 1, 1, 3),
    ),
    ("rank, derived", "MASTER_ADDR=a RANK=3 WORLD_SIZE=4 NNODES=2", "manual", True, (2, 2, 4, 1, 1, 3)),
    (
        "uneven",
        "MASTER_ADDR=a RANK=3 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 NODE_RANK=1 NNODES=2",
        "manual",
        True,
        (2, 1, 4, 1, 0, 3),
    ),
    ("one rank", "MASTER_ADDR=a RANK=0 WORLD_SIZE=1", "manual", True, (None, None, 1, None, 0, 0)),
    (
        "two ranks here",
        "MASTER_ADDR=127.0.0.1 RANK=1 WORLD_SIZE=2 LOCAL_RANK=1",
        "manual",
        True,
        (None, None, 2, None, 1, 1),
    ),
    ("two nodes here", "MASTER_ADDR=localhost NODE_RANK=0 NNODES=2", "manual", False, (2, None, None, 0, None, None)),
    (
        "Lightning's child",
        "MASTER_ADDR=127.0.0.1 MASTER_PORT=4000 NODE_RANK=0 LOCAL_RANK=1 WORLD_SIZE=2",
        "lightning",
        True,
        (1, 2, 2, 0, 1, 1),
    ),
    (
        "Fairlead's child",
        "FAIRLEAD_LAUNCHED=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=4000 NODE_RANK=0 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 "
        "WORLD_SIZE=2 RANK=1",
        "lightning",
        True,
        (1, 2, 2, 0, 1, 1),
    ),
    ("leaked rank", "LOCAL_RANK=0", "lightning", True, (1, None, None, 0, 0, 0)),
    ("empty", "MASTER_ADDR= NODE_RANK= RANK=", "lightning", False, (1, None, None, 0, None, None)),
    (
        "torchrun",
        "TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0 RANK=3 LOCAL_RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=1 "
        "GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=29500",
        "torchelastic",
        True,
        (2, 1, 4, 1, 0, 3),
    ),
    (
        "fake TPU pod",
        "TPU_WORKER_ID=1 TPU_WORKER_HOSTNAMES=t-0.svc,t-1.svc TPU_PROCESS_BOUNDS=1,1,2 PJRT_DEVICE=TPU",
        "xla",
        False,
        (2, None, None, 1, None, None),
    ),
    (
        "fake TPU processes",
        "CLOUD_TPU_TASK_ID=3 TPU_PROCESS_ADDRESSES=a:8476,a:8477,b:8476,b:8477",
        "xla",
        False,
        (2, None, None, 1, None, None),
    ),
    ("fake TPU bounds", "CLOUD_TPU_TASK_ID=3 TPU_HOST_BOUNDS=2,2,1", "xla", False, (4, None, None, 3, None, None)),
    ("fake TPU VM", "PJRT_DEVICE=TPU", "xla", False, (1, None, None, 0, None, None)),
    ("fake Kaggle TPU", "TPU_WORKER_ID=0 TPU_PROCESS_ADDRESSES=local", "xla", False, (1, None, None, 0, None, None)),
]


@pytest.mark.parametrize(("text", "name", "launched", "expected"), [h[1:] for h in HAND], ids=[h[0] for h in HAND])
def test_variables(
    text: str, name: str, launched: bool, expected: tuple[object, ...], choose: Choose, ranks: Ranks
) -> None:
    """Who is claimed to have started this process, and as which rank."""
    chosen = choose(variables(text))
    assert chosen.setting.value == name
    assert not chosen.findings
    assert chosen.topology is not None
    assert chosen.topology.launched is launched
    assert ranks(chosen.topology) == expected


def test_the_port_of_a_manual_start() -> None:
    """The port is 29500, or the user's."""
    for config, environ, port in [
        (ManualEnvironmentConfig(), {}, 29500),
        (ManualEnvironmentConfig(), {"MASTER_PORT": "12355"}, 12355),
        (ManualEnvironmentConfig(main_port=12356), {"MASTER_PORT": "12355"}, 12356),
    ]:
        found = manual.fairlead_topology(config, {"MASTER_ADDR": "a", "NODE_RANK": "0", **environ})
        assert found.main_port is not None
        assert found.main_port.value == port


def test_a_node_can_be_described_in_the_config_alone() -> None:
    """`--set trainer.environment.node_rank=1` on the second node."""
    found = manual.fairlead_topology(ManualEnvironmentConfig(main_address="a", node_rank=1), {})
    assert not found.launched
    assert found.node_rank is not None
    assert (found.node_rank.value, found.node_rank.reason) == (1, "environment.node_rank")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("NODE_RANK=0", "MASTER_ADDR is not set"),
        ("MASTER_ADDR=a", "NODE_RANK is not set"),
        ("MASTER_ADDR=a RANK=0", "WORLD_SIZE is not set"),
        ("MASTER_ADDR=a RANK=1 WORLD_SIZE=2", "LOCAL_RANK is not set"),
        ("MASTER_ADDR=a RANK=2 WORLD_SIZE=2 LOCAL_RANK=0", "2 (RANK) does not go with 2 (WORLD_SIZE)"),
        ("MASTER_ADDR=a NODE_RANK=2 NNODES=2", "2 (NODE_RANK) does not go with 2 (NNODES)"),
        ("MASTER_ADDR=a NODE_RANK=0 NNODES=2 WORLD_SIZE=3", "the ranks per node differ"),
        ("MASTER_ADDR=a NODE_RANK=first", "NODE_RANK is 'first'"),
        ("MASTER_ADDR=a NODE_RANK=0 MASTER_PORT=0", "MASTER_PORT is '0'"),
        ("MASTER_ADDR=a NODE_RANK=0 MASTER_PORT=70000", "MASTER_PORT is '70000'"),
    ],
)
def test_what_a_manual_start_lacks_is_named(text: str, told: str) -> None:
    with pytest.raises(FairleadError) as raised:
        manual.fairlead_topology(ManualEnvironmentConfig(), variables(text))
    assert told in raised.value.what
    assert raised.value.fix


def test_ranks_without_a_common_port_are_an_error_not_a_hang() -> None:
    """Lightning's own environment would choose a free port per rank, and they would wait for each other."""
    with pytest.raises(FairleadError, match="LOCAL_RANK is 1, but MASTER_PORT is not set"):
        lightning.fairlead_topology(LightningEnvironmentConfig(), {"LOCAL_RANK": "1"})


@pytest.mark.parametrize(
    "variable", ["RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]
)
def test_fairleads_launcher_keeps_its_promise_or_it_is_named(variable: str) -> None:
    child = variables(next(h[1] for h in HAND if h[0] == "Fairlead's child"))
    with pytest.raises(FairleadError, match=f"{variable} is not set"):
        lightning.fairlead_topology(LightningEnvironmentConfig(), {**child, variable: ""})


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_torchruns_promise_is_named(variable: str) -> None:
    worker = variables(next(h[1] for h in HAND if h[0] == "torchrun"))
    with pytest.raises(FairleadError, match=f"{variable} is not set"):
        torchelastic.fairlead_topology(
            TorchElasticEnvironmentConfig(), {k: v for k, v in worker.items() if k != variable}
        )


def test_an_old_agent_without_the_number_of_nodes(ranks: Ranks) -> None:
    worker = variables("RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 MASTER_ADDR=a MASTER_PORT=1")
    assert ranks(torchelastic.fairlead_topology(TorchElasticEnvironmentConfig(), worker)) == (2, 2, 4, 1, 1, 3)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("TPU_WORKER_HOSTNAMES=a,b", "TPU_WORKER_ID is not set"),
        ("TPU_WORKER_ID=2 TPU_WORKER_HOSTNAMES=a,b", "does not go with 2"),
        ("TPU_WORKER_ID=0 TPU_WORKER_HOSTNAMES=a,,b", "TPU_WORKER_HOSTNAMES is 'a,,b'"),
        ("TPU_WORKER_ID=0 TPU_HOST_BOUNDS=2,x", "TPU_HOST_BOUNDS is '2,x'"),
    ],
)
def test_malformed_tpu_variables_are_named(text: str, told: str) -> None:
    with pytest.raises(FairleadError) as raised:
        xla.fairlead_topology(XLAEnvironmentConfig(), variables(text))
    assert told in raised.value.what


def test_a_tie_is_a_finding(choose: Choose, plugins: PluginManager) -> None:
    """A TPU host in a Kubeflow pod: both are right, so the user is asked."""
    pod = "KUBERNETES_PORT=k PET_NNODES=2 PET_NODE_RANK=0 PET_MASTER_ADDR=a PET_MASTER_PORT=1 PET_NPROC_PER_NODE=1"
    chosen = choose(variables(f"{pod} TPU_WORKER_ID=0 TPU_WORKER_HOSTNAMES=a,b"))
    assert [finding.code for finding in chosen.findings] == ["environment-tie"]

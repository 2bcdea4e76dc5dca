"""LSF. No LSF can be had here: the environments are written after IBM's documentation of LSF 10.1 and JSM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fairlead import FairleadError, Topology
from fairlead.detect import ChosenEnvironment
from fairlead_environments import LSFEnvironmentConfig
from fairlead_environments.lsf.hosts import index_of, read_hosts
from fairlead_environments.lsf.topology import topology

Choose = Callable[[Mapping[str, str]], ChosenEnvironment]
Ranks = Callable[[Topology], tuple[object, ...]]

CONFIG = LSFEnvironmentConfig()


def fake_jsrun(rank: int, *, hosts: str, per_node: int = 2, size: int = 4, local_size: bool = True) -> dict[str, str]:
    """A fake of a `jsrun` task, `per_node` ranks on each node."""
    environ = {
        "LSB_JOBID": "4711",
        "LSB_HOSTS": hosts,
        "JSM_NAMESPACE_RANK": str(rank),
        "JSM_NAMESPACE_SIZE": str(size),
        "JSM_NAMESPACE_LOCAL_RANK": str(rank % per_node),
        "OMPI_COMM_WORLD_RANK": str(rank),  # jsrun starts Spectrum MPI's ranks
        "PMIX_RANK": str(rank),
        "PMIX_NAMESPACE": "jsm",
    }
    return {**environ, "JSM_NAMESPACE_LOCAL_SIZE": str(per_node)} if local_size else environ


def fake_blaunch(task: int, hosts: str) -> dict[str, str]:
    """A fake of a `blaunch` task; tasks count from 1."""
    return {"LSB_JOBID": "4712", "LSB_HOSTS": hosts, "LSF_PM_TASKID": str(task)}


WITH_LAUNCH_NODE = "batch3 h36n03 h36n03 h36n04 h36n04"
WITHOUT = "h36n03 h36n03 h36n04 h36n04"
ONE_SLOT_EACH = "batch3 h36n03 h36n04"


@pytest.mark.parametrize("local_size", [True, False])
@pytest.mark.parametrize("hosts", [WITH_LAUNCH_NODE, WITHOUT])
@pytest.mark.parametrize("rank", range(4))
def test_jsrun(rank: int, hosts: str, local_size: bool, ranks: Ranks) -> None:
    """Unique hosts in LSB_HOSTS; the launch node is dropped where there is one, and only there."""
    host = ("h36n03", "h36n04")[rank // 2]
    found = topology(CONFIG, fake_jsrun(rank, hosts=hosts, local_size=local_size), host)
    assert ranks(found) == (2, 2, 4, rank // 2, rank % 2, rank)
    assert found.main_address is not None
    assert found.main_address.value == "h36n03"


def test_a_launch_node_with_as_many_slots_is_found_by_the_number_of_nodes(ranks: Ranks) -> None:
    found = topology(CONFIG, fake_jsrun(3, hosts=ONE_SLOT_EACH), "h36n04")
    assert ranks(found) == (2, 2, 4, 1, 1, 3)
    assert found.num_nodes is not None
    assert found.num_nodes.reason == "unique hosts in LSB_HOSTS without the launch node batch3"


@pytest.mark.parametrize("hostname", ["h36n04", "h36n04.summit.example", "H36N04"])
def test_full_and_short_host_names_are_the_same_host(hostname: str, ranks: Ranks) -> None:
    for hosts in (WITHOUT, WITHOUT.replace("n03", "n03.summit.example").replace("n04", "n04.summit.example")):
        assert ranks(topology(CONFIG, fake_jsrun(2, hosts=hosts, local_size=False), hostname))[3] == 1


def test_a_short_name_that_two_hosts_have_is_no_answer() -> None:
    hosts = ("n1.a.example", "n1.b.example")
    assert index_of("n1", hosts) is None
    assert index_of("n1.b.example", hosts) == 1


def test_a_host_of_another_name_is_placed_by_its_rank(ranks: Ranks) -> None:
    """In a container the host may have any name; JSM's numbers tell the node, if they are all there."""
    assert ranks(topology(CONFIG, fake_jsrun(2, hosts=WITHOUT), "7f3a"))[3] == 1
    with pytest.raises(FairleadError, match="'7f3a', is not one of the job's hosts"):
        topology(CONFIG, fake_jsrun(2, hosts=WITHOUT, local_size=False), "7f3a")


def test_jsrun_is_lsf_though_it_sets_the_variables_of_mpi(choose: Choose) -> None:
    chosen = choose(fake_jsrun(1, hosts=WITH_LAUNCH_NODE))
    assert chosen.setting.value == "lsf"
    assert set(chosen.claims) == {"lsf", "lightning"}
    assert not chosen.findings


@pytest.mark.parametrize(
    ("task", "host", "expected"),
    [
        (1, "h1", (2, 3, 4, 0, 0, 0)),
        (3, "h1.example", (2, 3, 4, 0, 2, 2)),
        (4, "h2", (2, 1, 4, 1, 0, 3)),
        (4, "another-name", (2, 1, 4, 1, 0, 3)),
    ],
)
def test_blaunch(task: int, host: str, expected: tuple[int, ...], ranks: Ranks) -> None:
    """One task per slot, in the order of LSB_HOSTS, also with uneven slots."""
    found = topology(CONFIG, fake_blaunch(task, "h1 h1 h1 h2"), host)
    assert ranks(found) == expected


def test_separate_blaunch_commands_are_refused() -> None:
    """`for h in ...; do blaunch $h ...`: each counts from 1, so there would be two ranks 0."""
    with pytest.raises(FairleadError, match="task 1 of the job belongs on h1, but this is h2"):
        topology(CONFIG, fake_blaunch(1, "h1 h1 h2 h2"), "h2")
    with pytest.raises(FairleadError, match="LSF_PM_TASKID is 5, but the job has 4 slots"):
        topology(CONFIG, fake_blaunch(5, "h1 h1 h2 h2"), "h2")


@pytest.mark.parametrize("hosts", ["h1 h1 h1 h1", "h1 h1 h2 h2"])
def test_a_plain_bsub_starts_one_process_and_is_not_lsf(hosts: str, choose: Choose) -> None:
    """`bsub -n 4 python train.py` runs once, on the first host, whatever was allocated."""
    assert choose({"LSB_JOBID": "4713", "LSB_HOSTS": hosts, "LSB_DJOB_NUMPROC": "4"}).setting.value == "lightning"


def test_every_source_of_hosts_gives_the_same(tmp_path: Path) -> None:
    (tmp_path / "rankfile").write_text("batch3\nh1\nh1\nh2\nh2\n")
    (tmp_path / "affinity").write_text("batch3 0\nh1 0,1\nh1 2,3 /0 0\nh2 0,1\n\nh2 2,3\n")
    sources = [
        {"LSB_HOSTS": "batch3 h1 h1 h2 h2"},
        {"LSB_MCPU_HOSTS": "batch3 1 h1 2 h2 2"},
        {"LSB_HOSTS": "", "LSB_DJOB_RANKFILE": str(tmp_path / "rankfile")},
        {"LSB_DJOB_HOSTFILE": str(tmp_path / "rankfile")},
        {"LSB_AFFINITY_HOSTFILE": str(tmp_path / "affinity")},
    ]
    for source in sources:
        job = read_hosts(source)
        assert job.slots == ("batch3", "h1", "h1", "h2", "h2")
        assert job.compute_hosts(None).value == ("h1", "h2")


@pytest.mark.parametrize("local_size", [True, False])
def test_a_rank_file_with_one_line_a_host_begins_with_the_launch_node(
    tmp_path: Path, local_size: bool, ranks: Ranks
) -> None:
    """One task on each of two hosts: all would have waited for a rank 0 on the node that runs none."""
    file = tmp_path / "rankfile"
    file.write_text("batch3\nh1\nh2\n")
    names = {"LSB_JOBID": "1", "LSB_DJOB_RANKFILE": str(file), "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "1"}
    environ = {**names, "JSM_NAMESPACE_LOCAL_RANK": "0", **({"JSM_NAMESPACE_LOCAL_SIZE": "1"} if local_size else {})}
    found = topology(CONFIG, environ, "h2")
    assert found.main_address is not None
    assert found.main_address.value == "h1"
    assert ranks(found) == (2, 1, 2, 1, 0, 1)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ({}, "LSB_HOSTS is not set"),
        ({"LSB_MCPU_HOSTS": "h1 2 h2"}, "hosts and slots in turn"),
        ({"LSB_MCPU_HOSTS": "h1 two"}, "hosts and slots in turn"),
        ({"LSB_DJOB_RANKFILE": "/nowhere/rankfile"}, "LSB_DJOB_RANKFILE names cannot be read"),
        ({"LSB_DJOB_RANKFILE": "/dev/null"}, "LSB_DJOB_RANKFILE names is empty"),
    ],
)
def test_hosts_that_cannot_be_read_are_named(source: dict[str, str], told: str) -> None:
    with pytest.raises(FairleadError, match=told):
        read_hosts(source)


def test_jobs_of_an_array_meet_on_different_ports() -> None:
    environ = fake_blaunch(1, "h1 h2")
    ports = [topology(CONFIG, {**environ, "LSB_JOBINDEX": index}, "h1").main_port for index in "123"]
    assert len({port.value for port in ports if port is not None}) == 3

"""Real ranks that were given no port, or that do not fit together."""

from __future__ import annotations

import contextlib
import os
import resource
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fairlead.starts import Start
from fairlead_distributed import (
    AddressUnreachableError,
    PortError,
    PreflightError,
    all_reduce,
    bind_listener,
    destroy_process_group,
    group_store,
    init_process_group,
    process_group,
    tcp_store,
)
from fairlead_distributed.testing import run_ranks

SOON = timedelta(seconds=3)
LATER = timedelta(seconds=60)


def free_ports(count: int) -> tuple[int, ...]:
    with contextlib.ExitStack() as stack:
        return tuple(stack.enter_context(bind_listener([0])).getsockname()[1] for _ in range(count))


def in_two_groups(process: int, ports: tuple[int, ...]) -> list[int]:
    """Four processes of two jobs, whose ports are all the same, three starts each."""
    job, rank = divmod(process, 2)
    sums = []
    for _ in range(3):
        start = Start(f"job {job}, step 0, restart 0", ports)
        with process_group("gloo", "tcp://localhost:1", 2, rank, environ={}, start=start, preflight_timeout=LATER):
            sums.append(int(all_reduce(torch.tensor(10**job + rank)).item()))
    return sums


@pytest.mark.full
def test_two_jobs_with_the_same_ports_on_one_host() -> None:
    """Each finds its own, three times in a row, though others listen on the first two ports."""
    with bind_listener([0]) as silent:
        store = tcp_store(bind_listener([0]))
        ports = (silent.getsockname()[1], store.port, *free_ports(6))
        assert run_ranks(in_two_groups, 4, ports, init=False) == [[3] * 3] * 2 + [[21] * 3] * 2
        assert store.num_keys() <= 1  # nobody wrote into a stranger's store


def messages_of(rank: int, ports: tuple[int, ...]) -> dict[str, str]:
    """The error of each start that cannot succeed; a group is made after them all the same."""
    found = {}

    def start(name: str, **changed: object) -> None:
        known = Start(f"job 12, {name}", ports, ("n1", "n2"), ("n1", "n1", "n2", "n2"))
        arguments = {"world_size": 3, "start": known, "preflight_timeout": LATER, **changed}
        with pytest.raises(PreflightError) as caught:
            init_process_group("gloo", "tcp://localhost:1", rank=rank, environ={}, **arguments)  # type: ignore[arg-type]
        found[name] = str(caught.value)
        assert not dist.is_initialized()

    start("config", config_hash="abc" if rank == 1 else "def")
    version = torch.__version__
    torch.__version__ = "2.12.1" if rank == 0 else "2.13.0"  # type: ignore[assignment]
    start("version")
    torch.__version__ = version
    start("device", device="meta" if rank == 2 else "cpu")
    start("missing", world_size=4, preflight_timeout=SOON if rank == 0 else LATER)
    with process_group("gloo", "tcp://localhost:1", 3, rank, environ={}, start=Start("job 12", ports)):
        found["sum"] = str(all_reduce(torch.tensor(1)).item())
    return found


def test_ranks_that_do_not_fit_together() -> None:
    """The same text on all ranks, with rank, host and both values; the missing with their hosts."""
    zero, *others = run_ranks(messages_of, 3, free_ports(4), init=False, timeout=120)
    assert others == [zero, zero]
    assert "config: rank 1 on" in zero["config"]
    assert "has abc; the other 2 ranks have def" in zero["config"]
    assert "torch: rank 0 on" in zero["version"]
    assert "has 2.12.1; the other 2 ranks have 2.13.0" in zero["version"]
    assert "has meta; the other 2 ranks have cpu" in zero["device"]
    assert "3 of 4 ranks came" in zero["missing"]
    assert "missing: rank 3 on n2" in zero["missing"]
    assert "no rank came from n1, n2" in zero["missing"]  # these hosts are not this machine
    assert zero["sum"] == "3"


def other_jobs(rank: int) -> str:
    """Ranks of two jobs that were given one port."""
    job = Start(f"job {12 + rank // 2}, step 0, restart 0")
    with pytest.raises(PreflightError) as caught:
        init_process_group("gloo", start=job, preflight_timeout=LATER)
    return str(caught.value)


def test_a_rank_of_another_job() -> None:
    messages = run_ranks(other_jobs, 3, init=False)
    assert len(set(messages)) == 1
    assert "job: rank 2 on" in messages[0]
    assert "has job 13, step 0, restart 0; the other 2 ranks have job 12, step 0, restart 0" in messages[0]


def test_a_given_port_is_used_as_it_is() -> None:
    """It is taken, and nobody looks for another one."""
    with bind_listener([0]) as taken:
        port = taken.getsockname()[1]
        environ = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        with pytest.raises(PortError, match=f"cannot listen on port {port}") as caught:
            init_process_group("gloo", rank=0, world_size=2, environ=environ, preflight_timeout=SOON)
        assert "MASTER_ADDR=localhost" in str(caught.value)
        # The other ranks meet a service that never answers, where torch's own client would wait for ever.
        with pytest.raises(AddressUnreachableError, match="is not the store of rank 0") as unreachable:
            init_process_group("gloo", rank=1, world_size=2, environ=environ, preflight_timeout=timedelta(seconds=1))
        assert str(port) in str(unreachable.value)


def test_the_groups_store_is_there_for_others() -> None:
    """The stop agreement uses it beside the group."""
    assert group_store() is None
    with process_group(environ={}):
        store = group_store()
        assert store is not None
        store.set("mine", "7")
        assert store.get("mine") == b"7"
    destroy_process_group()
    assert group_store() is None


def over_the_store(rank: int) -> list[bytes]:
    store = group_store()
    assert store is not None
    mine = dist.PrefixStore("mine", store)
    mine.set(str(rank), f"of {rank}")
    return [mine.get("0"), mine.get("1")]


def test_the_groups_store_is_shared() -> None:
    assert run_ranks(over_the_store, 2) == [[b"of 0", b"of 1"]] * 2


def limit_of_files(rank: int, ports: tuple[int, ...]) -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with process_group("gloo", "tcp://localhost:1", 2, rank, environ={}, start=Start("job 12", ports)):
        all_reduce(torch.tensor(1))  # a rank that has left is no peer for one that still connects
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_rank_0_may_have_a_connection_of_every_rank() -> None:
    """With the usual limit of 1024 files, a job of 1024 ranks would wait for the last ones for ever."""
    zero, one = run_ranks(limit_of_files, 2, free_ports(4), init=False)
    assert zero >= min(1024 + 8 * 2, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    assert one == 256


def dies_between_number_and_word(rank: int) -> int:
    """As a process does that is killed there, before the others come."""
    if rank == 1:
        store = tcp_store((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        dist.PrefixStore("fairlead/restart_0", store).add("hello", 1)
    with process_group("gloo", preflight_timeout=LATER):
        return int(all_reduce(torch.tensor(1)).item())


def test_a_process_that_died_while_it_came_holds_nobody_up() -> None:
    assert run_ranks(dies_between_number_and_word, 3, init=False) == [3, 3, 3]

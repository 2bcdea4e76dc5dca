"""How ranks without a port find rank 0, among whatever else listens on the machine."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from fairlead_distributed import AddressNotFoundError, AddressUnreachableError, PortError, bind_listener, tcp_store
from fairlead_distributed.opening import StartListener, find_store

JOB = "job 12, step 0, restart 0"


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(bind_listener([0])) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


@contextlib.contextmanager
def service(greet: Callable[[socket.socket], None]) -> Iterator[int]:
    """A service of somebody else; what it has heard has to be nothing."""
    listener, heard = bind_listener([0]), list[bytes]()

    def serve() -> None:
        visitors = []
        with contextlib.suppress(OSError):
            while True:
                visitor, _ = listener.accept()
                visitors.append(visitor)
                greet(visitor)
        for visitor in visitors:
            with contextlib.suppress(OSError):  # it sent nothing, or is gone
                visitor.setblocking(False)
                heard.append(visitor.recv(100))
            visitor.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()
    assert set(heard) <= {b""}


def silent(visitor: socket.socket) -> None:
    """Accepts and never answers."""


def ssh(visitor: socket.socket) -> None:
    visitor.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n")


def hangs_up(visitor: socket.socket) -> None:
    visitor.close()


def babbles(visitor: socket.socket) -> None:
    with contextlib.suppress(OSError):
        visitor.sendall(b"\0\xff" * 100_000)


def lies(visitor: socket.socket) -> None:
    visitor.sendall(b"fairlead-listener-1 0123 none\n")


@pytest.mark.parametrize("greet", [silent, ssh, hangs_up, babbles, lies])
def test_another_service_on_a_candidate_is_passed_over(greet: Callable[[socket.socket], None]) -> None:
    """Nothing is said to it, and rank 0 behind it is found."""
    with service(greet) as foreign:
        ports = [foreign, *free_ports(2)]
        with contextlib.closing(StartListener(JOB, ports, 4711)) as listener:
            assert listener.port == ports[1]
            assert find_store("127.0.0.1", ports, JOB, rank=1, timeout=60) == ("127.0.0.1", 4711)


def test_a_store_and_a_door_of_another_job_are_passed_over() -> None:
    """Two jobs whose ports are the same by chance."""
    store = tcp_store(bind_listener([0]))
    ports = [store.port, *free_ports(3)]
    with (
        contextlib.closing(StartListener("job 13, step 0, restart 0", ports, 1)),
        contextlib.closing(StartListener(JOB, ports, 2)) as mine,
    ):
        assert mine.port == ports[2]
        assert find_store("127.0.0.1", ports, JOB, rank=1, timeout=60) == ("127.0.0.1", 2)
        assert find_store("127.0.0.1", ports, "job 13, step 0, restart 0", rank=1, timeout=60) == ("127.0.0.1", 1)
    assert store.num_keys() <= 1  # torch's own


def test_rank_0_may_come_late() -> None:
    """Imports from a parallel file system take minutes on one node and seconds on another."""
    ports, listeners = free_ports(2), list[StartListener]()
    late = threading.Timer(1.5, lambda: listeners.append(StartListener(JOB, ports, 4711)))
    late.start()
    try:
        assert find_store("127.0.0.1", ports, JOB, rank=1, timeout=60) == ("127.0.0.1", 4711)
    finally:
        late.join()
        listeners[0].close()


def test_rank_0_is_found_behind_a_port_that_became_free_again() -> None:
    """Who held the first port when rank 0 came has ended since."""
    ports = free_ports(2)
    with bind_listener([ports[0]]):
        listener = StartListener(JOB, ports, 4711)
    with contextlib.closing(listener):
        assert find_store("127.0.0.1", ports, JOB, rank=1, timeout=60) == ("127.0.0.1", 4711)


def test_visitors_that_stay_do_not_hold_the_door() -> None:
    ports = free_ports(1)
    with contextlib.closing(StartListener(JOB, ports, 4711)) as listener, contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
        assert find_store("127.0.0.1", ports, JOB, rank=1, timeout=60) == ("127.0.0.1", 4711)


def test_a_closed_door_is_gone() -> None:
    """So that a later start of the same ranks does not find an earlier store."""
    ports = free_ports(1)
    StartListener(JOB, ports, 1).close()
    with contextlib.closing(StartListener(JOB, ports, 2)):
        assert find_store("127.0.0.1", ports, JOB, rank=1, timeout=60) == ("127.0.0.1", 2)


def test_no_candidate_is_free() -> None:
    with bind_listener([0]) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match="no free port") as caught:
            StartListener(JOB, [port], 1)
    assert f"{port}: in use" in str(caught.value)


def test_two_launches_that_cannot_be_told_apart() -> None:
    """They would exchange ranks without anyone noticing."""
    ports = free_ports(2)
    with (
        contextlib.closing(StartListener(JOB, ports, 1)),
        pytest.raises(PortError, match="another rank 0 of job 12, step 0") as caught,
    ):
        StartListener(JOB, ports, 2)
    assert "MASTER_PORT" in str(caught.value)
    with bind_listener([ports[1]]):  # what the second one had taken is free again
        pass


def test_nobody_is_there() -> None:
    """What was found on each port."""
    with service(ssh) as foreign, contextlib.closing(StartListener("job 13", free_ports(1), 1)) as other:
        ports = [foreign, other.port, *free_ports(1)]
        with pytest.raises(AddressUnreachableError) as caught:
            find_store("127.0.0.1", ports, JOB, rank=3, timeout=1)
    text = str(caught.value)
    assert f"rank 3 found no rank 0 of {JOB} at 127.0.0.1" in text
    assert f"another service listens: {ports[0]}" in text
    assert f"the ranks of another start meet there: {ports[1]}" in text
    assert f"connection refused: no process listens there: {ports[2]}" in text
    assert caught.value.missing == (0,)


def test_the_name_does_not_resolve() -> None:
    with pytest.raises(AddressNotFoundError) as caught:
        find_store("no-such-host.invalid", [20000, 20001], JOB, rank=3, timeout=0.5)
    assert "the name 'no-such-host.invalid' does not resolve" in str(caught.value)
    assert "environment.main_address" in str(caught.value)


def test_an_address_that_does_not_answer_ends_at_the_deadline() -> None:
    """A firewall that drops: packets to TEST-NET-1 go nowhere, or are refused by the first router."""
    began = time.monotonic()
    with pytest.raises(AddressUnreachableError, match="found no rank 0"):
        find_store("192.0.2.1", range(20000, 20016), JOB, rank=3, timeout=2)
    assert time.monotonic() - began < 60

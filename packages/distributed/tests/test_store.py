from __future__ import annotations

from datetime import timedelta

import pytest

from fairlead_distributed import PortError, RendezvousError, bind_listener, choose_port, free_port, tcp_store


def test_the_next_free_port_is_chosen() -> None:
    """The default of one machine: the wanted port when it is free, else the next."""
    start = free_port()
    assert choose_port(start=start) == start
    with bind_listener([start], "127.0.0.1"):
        assert choose_port(start=start) > start
        with pytest.raises(PortError, match="no free port") as caught:
            choose_port(start=start, tries=1)
        assert f"{start}: in use" in str(caught.value)


def test_a_bound_listener_keeps_its_port_and_becomes_a_store() -> None:
    taken = bind_listener([0], "127.0.0.1")
    port = taken.getsockname()[1]
    with taken, bind_listener([port, 0], "127.0.0.1") as listener:
        other = listener.getsockname()[1]
        assert other != port
        server = tcp_store(listener)
        client = tcp_store(("127.0.0.1", other))
        client.set("step", "7")
        assert server.get("step") == b"7"
        with pytest.raises(PortError):  # nobody else gets it meanwhile
            bind_listener([other], "127.0.0.1")


def test_a_listener_on_all_addresses() -> None:
    with bind_listener() as listener:
        server = tcp_store(listener)
        tcp_store(("127.0.0.1", server.port)).set("a", "b")
        assert server.get("a") == b"b"


def test_wrong_addresses() -> None:
    with pytest.raises(PortError, match="cannot listen on"):
        bind_listener([0], "192.0.2.1")  # TEST-NET-1: not an address of this machine
    with pytest.raises(PortError, match="no free port"):
        bind_listener([])
    with pytest.raises(RendezvousError, match="no store answers"):
        tcp_store(("127.0.0.1", free_port()), timeout=timedelta(seconds=0.2))

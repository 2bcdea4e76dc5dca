"""Messages between ranks; a single process has a mailbox of the same behaviour."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from fairlead_distributed import bind_listener, tcp_store
from fairlead_runs.mailbox import Mailbox, StoreMailbox


@pytest.mark.parametrize("mailbox", [Mailbox(), StoreMailbox(dist.HashStore(), 0, 1)], ids=["local", "store"])
def test_a_single_process_meets_itself(mailbox: Mailbox) -> None:
    assert mailbox.missing("saved") == (0,)
    assert mailbox.get("saved/0", 0.01) is None
    assert not mailbox.has("saved/all")
    assert mailbox.arrive("saved", "at step 7")
    assert mailbox.wait("saved/all", 0.01)
    assert (mailbox.missing("saved"), mailbox.arrived("saved")) == ((), ["at step 7"])
    mailbox.put("plan", "one")
    mailbox.put("plan", "another")
    assert mailbox.get("plan", 0.01) == "another"
    assert [mailbox.count("n"), mailbox.count("n", 0), mailbox.count("n", 2)] == [1, 1, 3]


def test_several_ranks_meet() -> None:
    store = dist.HashStore()
    first, second = (StoreMailbox(store, rank, 2) for rank in range(2))
    assert not first.arrive("saved", "here")
    assert not second.wait("saved/all", 0.01)
    assert second.missing("saved") == (1,)
    assert second.arrive("saved", "")
    assert first.arrived("saved") == ["here", ""]
    assert second.put_first("verdict", "stop") == "stop"
    assert first.put_first("verdict", "go on") == "stop"
    assert first.get("verdict", 0.01) == "stop"
    first.put_all(["wake/0", "wake/1"])
    assert second.has("wake/1")


def test_a_wait_of_no_time_only_looks(server: dist.TCPStore, capfd: pytest.CaptureFixture[str]) -> None:
    """Torch warns of each wait that ends without a key, and asks a name server for the names in it: for seconds."""
    mailbox = StoreMailbox(server, 0, 1)
    assert not mailbox.wait("later", 0)
    mailbox.put("later")
    assert mailbox.wait("later", 0)
    assert capfd.readouterr().err == ""


@pytest.fixture
def server() -> dist.TCPStore:
    return tcp_store(bind_listener([0], "127.0.0.1"))

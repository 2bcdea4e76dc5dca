"""Messages between ranks; a single process has a channel of the same behaviour."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from fairlead_hpc_signals.channel import Channel, StoreChannel


@pytest.mark.parametrize("channel", [Channel(), StoreChannel(dist.HashStore(), 0, 1)], ids=["local", "store"])
def test_a_single_process_meets_itself(channel: Channel) -> None:
    assert channel.missing("saved") == (0,)
    assert channel.get("saved/0", 0.01) is None
    assert not channel.has("saved/all")
    assert channel.arrive("saved", "at step 7")
    assert channel.wait("saved/all", 0.01)
    assert (channel.missing("saved"), channel.arrived("saved")) == ((), ["at step 7"])
    channel.put("plan", "one")
    channel.put("plan", "another")
    assert channel.get("plan", 0.01) == "another"
    assert [channel.count("n"), channel.count("n", 0), channel.count("n", 2)] == [1, 1, 3]


def test_several_ranks_meet() -> None:
    store = dist.HashStore()
    first, second = (StoreChannel(store, rank, 2) for rank in range(2))
    assert not first.arrive("saved", "here")
    assert not second.wait("saved/all", 0.01)
    assert second.missing("saved") == (1,)
    assert second.arrive("saved", "")
    assert first.arrived("saved") == ["here", ""]
    second.put_first("verdict", "stop")
    first.put_first("verdict", "go on")
    assert first.get("verdict", 0.01) == "stop"
    first.put_all(["wake/0", "wake/1"])
    assert second.has("wake/1")

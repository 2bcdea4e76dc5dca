"""What collectives take, by where their ranks lie, and by what was measured."""

from __future__ import annotations

import pytest

from fairlead_planning.collectives import Collectives, Group, measured_from
from fairlead_planning.devices import Cluster

GIB = 2.0**30
H100 = Cluster.of("h100")


def test_a_group_within_a_node_is_as_fast_as_its_links() -> None:
    one = Collectives(H100).seconds("all_gather", GIB, Group.of(8, 1, H100.domain))
    assert one == pytest.approx(GIB * 7 / 8 / (H100.link.rate(8) * 1e9), rel=0.02)


def test_an_all_reduce_moves_twice_what_a_reduce_scatter_does() -> None:
    group = Group.of(32, 1, H100.domain)
    both = [Collectives(H100).seconds(name, GIB, group) for name in ("all_reduce", "reduce_scatter")]
    assert both[0] == pytest.approx(2 * both[1])


def test_between_nodes_all_members_of_a_node_share_the_work_and_one_a_node_does_it_alone() -> None:
    beside, apart = Group.of(64, 1, H100.domain), Group.of(8, 8, H100.domain)
    assert (beside.near, beside.spread, apart.near, apart.spread) == (8, 8, 1, 8)
    seconds = [Collectives(H100).seconds("all_gather", GIB, one) for one in (beside, apart)]
    assert seconds[0] < seconds[1] / 5


def test_nothing_is_sent_alone_and_small_messages_cost_their_latency() -> None:
    them = Collectives(H100)
    assert them.seconds("all_reduce", GIB, Group.of(1, 1, 8)) == 0
    few, many = (them.seconds("all_reduce", 8, Group.of(ranks, 1, 8)) for ranks in (8, 512))
    assert 0 < few < many / 5


def test_what_was_measured_goes_before_the_table_where_it_speaks_of_the_same_network() -> None:
    rows = [
        {"op": "all_reduce", "ranks": 8, "nodes": 1, "bytes": 2**20, "bus_gb_s": 50.0, "latency_us": 30.0},
        {"op": "all_reduce", "ranks": 8, "nodes": 1, "bytes": 2**30, "bus_gb_s": 200.0, "latency_us": 30.0},
    ]
    them, table = Collectives(H100, measured_from(rows)), Collectives(H100)
    inside, across = Group.of(8, 1, 8), Group.of(16, 1, 8)
    assert them.seconds("all_reduce", GIB, inside) == pytest.approx(GIB * 2 * 7 / 8 / 200e9)
    assert them.seconds("all_reduce", 64, inside) == pytest.approx(30e-6)
    assert them.seconds("all_reduce", GIB, across) == table.seconds("all_reduce", GIB, across)
    assert them.seconds("all_gather", GIB, inside) == table.seconds("all_gather", GIB, inside)

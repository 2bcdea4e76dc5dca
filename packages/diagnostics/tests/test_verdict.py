"""Who is bad, from what the nodes say: only what fails, and only who differs from the others."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from fairlead_diagnostics.checking import Check, Result
from fairlead_diagnostics.pairs import blame, schedule
from fairlead_diagnostics.verdict import NodeReport, Verdict, judge

CHECKS = (Check("devices", "a:b"), Check("matmul", "a:b", sure=True), Check("write", "a:b"))
FINE = Result(True, "fine", 0.1)


def reports(nodes: int, **wrong: dict[int, Result]) -> dict[int, NodeReport]:
    """Nodes whose checks are fine, but for those that are given by check and node."""
    names = [*(check.name for check in CHECKS), "names"]
    return {
        node: NodeReport(f"n{node}", {name: wrong.get(name, {}).get(node, FINE) for name in names})
        for node in range(nodes)
    }


def judged(said: dict[int, NodeReport], gone: dict[int, str] | None = None) -> Verdict:
    gone = gone or {}
    return judge(said, gone, {node: f"n{node}" for node in {*said, *gone}}, CHECKS)


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8, 100])
def test_in_each_round_a_node_has_one_partner_and_another_each_time(nodes: int) -> None:
    rounds = schedule(range(10, 10 + nodes))
    assert len(rounds) == {2: 1, 3: 3, 4: 3, 5: 3, 8: 3, 100: 7}[nodes]
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy)) == nodes - nodes % 2
    met = [pair for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met))


@pytest.mark.parametrize("nodes", [4, 7, 64])
@pytest.mark.parametrize("bad", [{1}, {0, 2}])  # of seven, the sixth then meets bad ones only
def test_a_node_that_fails_with_all_is_told_from_its_partners(nodes: int, bad: set[int]) -> None:
    tried = {pair: not bad & set(pair) for pairs in schedule(range(nodes)) for pair in pairs}
    assert blame(tried) == (bad, [])


def test_one_link_of_two_good_nodes_and_two_nodes_alone_blame_nobody() -> None:
    everybody = dict.fromkeys(combinations(range(4), 2), True)
    assert blame({**everybody, (1, 2): False}) == (set(), [(1, 2)])
    assert blame({(0, 1): False}) == (set(), [(0, 1)])
    assert blame(dict.fromkeys(everybody, False)) == (set(), sorted(everybody))


def test_what_fails_on_one_node_is_that_nodes_fault_and_on_all_nobodys() -> None:
    wrong = Result(False, "3 numbers are wrong")
    verdict = judged(reports(3, matmul={1: wrong}))
    assert verdict.bad == {1: ["matmul: 3 numbers are wrong"]}
    full = Result(False, "/runs cannot be written: No space left on device")
    verdict = judged(reports(3, matmul={1: wrong}, write=dict.fromkeys(range(3), full)))
    assert verdict.unclear == ["write fails on every node: /runs cannot be written: No space left on device"]
    assert not verdict.fit


def test_on_one_node_alone_only_wrong_bits_count_against_it() -> None:
    assert judged(reports(1, write={0: Result(False, "no")})).unclear == ["write fails on the only node: no"]
    assert judged(reports(1, matmul={0: Result(False, "no")})).bad == {0: ["matmul: no"]}


def test_slow_is_a_warning_with_its_number_beside_the_median_of_the_others() -> None:
    verdict = judged(reports(4, write={2: Result(True, "fine", 9.0)}))
    assert (verdict.fit, verdict.bad) == (True, {})
    assert verdict.warnings == ["n2 is slow: write took 9.00 s; the median of the others is 0.10 s"]
    assert judged(reports(4, write={2: Result(True, "fine", 0.4)})).warnings == []  # four times of nothing


def test_a_clock_that_differs_is_a_warning() -> None:
    said = reports(3)
    said[1] = NodeReport("n1", said[1].results, offset_s=-7.5)
    assert judged(said).warnings == ["n1: its clock is 7.5 s ahead of the others'"]


def test_a_name_that_one_node_does_not_know_and_one_that_nobody_knows() -> None:
    def unknown(*nodes: int) -> Result:
        failed = {node: f"n{node} does not resolve" for node in nodes}
        return Result(False, "; ".join(failed.values()), failed=failed)

    assert list(judged(reports(4, names={2: unknown(0, 1, 3)})).bad) == [2]
    verdict = judged(reports(4, names={node: unknown(3) for node in range(3)}))
    assert verdict.bad == {3: ["names: n0 with n3: n3 does not resolve; n1 with n3: n3 does not resolve; "
                               "n2 with n3: n3 does not resolve"]}  # fmt: skip
    assert list(judged(reports(4, names={1: Result(False, "it hangs")})).bad) == [1]


@pytest.mark.parametrize(
    ("nodes", "absent", "bad"), [(4, {3}, {3}), (3, {2}, {2}), (4, {1, 2, 3}, set()), (2, {1}, set())]
)
def test_a_node_that_never_came_is_named_unless_most_did_not(nodes: int, absent: set[int], bad: set[int]) -> None:
    said = {node: report for node, report in reports(nodes).items() if node not in absent}
    verdict = judged(said, dict.fromkeys(absent, "it did not come within 120 s"))
    assert set(verdict.bad) == bad
    assert not verdict.fit
    assert "it did not come within 120 s" in " ".join(
        [*verdict.unclear, *(r for rs in verdict.bad.values() for r in rs)]
    )


def test_an_all_reduce_that_one_node_cannot_do_counts_against_it_alone() -> None:
    said: dict[int, Any] = reports(4)
    for node, other in combinations(range(4), 2):
        result = Result(False, "Connection refused") if 2 in (node, other) else Result(True, "fine", 0.1)
        for one, partner in ((node, other), (other, node)):
            said[one] = NodeReport(f"n{one}", said[one].results, {**said[one].pairs, partner: result})
    assert list(judged(said).bad) == [2]
    assert judged(said).bad[2][0].startswith("all-reduce: n0 with n2: Connection refused")


def test_a_check_that_was_not_made_is_said_and_is_no_failure() -> None:
    absent = Result(None, "torch is not installed")
    verdict = judged(reports(3, matmul=dict.fromkeys(range(3), absent)))
    assert (verdict.fit, verdict.not_made) == (True, ["matmul: torch is not installed"])

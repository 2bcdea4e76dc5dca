"""What the ranks compare before they form a group, in words."""

from __future__ import annotations

import dataclasses

import torch

from fairlead.starts import Start
from fairlead_distributed.preflight import RankFacts, absent_lines, differences, own_facts
from fairlead_runs.waiting import ranks_text


def world(**values: list[str]) -> dict[int, RankFacts]:
    """Ranks, two on each of n1, n2, ..., with one value each."""
    count = len(next(iter(values.values())))
    return {r: RankFacts(f"n{1 + r // 2}", 100 + r, {k: v[r] for k, v in values.items()}) for r in range(count)}


def test_equal_ranks_have_no_difference() -> None:
    facts = own_facts(torch.device("cpu"), start=Start("job 12"), config_hash="abc")
    assert set(facts.same) >= {"job", "config", "device", "python", "torch", "fairlead"}
    assert differences(dict.fromkeys(range(4), facts)) == []
    assert RankFacts.from_json(facts.to_json()) == facts


def test_the_majority_is_the_reference() -> None:
    """Rank, host and both values, also where it is rank 0 that differs."""
    found = differences(world(torch=["2.12.1", "2.13.0", "2.13.0", "2.13.0"]))
    assert found == ["torch: rank 0 on n1 has 2.12.1; the other 3 ranks have 2.13.0"]
    found = differences(world(torch=["2.13.0", "2.13.0", "2.12.1", "2.12.1", "2.13.0"]))
    assert found == ["torch: ranks 2, 3 on n2 have 2.12.1; the other 3 ranks have 2.13.0"]


def test_with_no_majority_the_lowest_rank_is() -> None:
    assert differences(world(config=["a", "b"])) == ["config: rank 1 on n1 has b; rank 0 has a"]


def test_every_difference_has_its_line() -> None:
    found = differences(world(torch=["1", "2", "1", "3"], device=["cuda", "cuda", "cuda", "cpu"]))
    assert found == [
        "torch: rank 1 on n1 has 2; the other 2 ranks have 1",
        "torch: rank 3 on n2 has 3; the other 2 ranks have 1",
        "device: rank 3 on n2 has cpu; the other 3 ranks have cuda",
    ]


def test_what_a_rank_does_not_know_is_no_difference() -> None:
    """One has imported Lightning before it joins, another has not yet."""
    ranks = world(torch=["1", "1"])
    ranks[1] = dataclasses.replace(ranks[1], same={**ranks[1].same, "lightning": "2.6.6"})
    assert differences(ranks) == []


def test_two_ranks_with_one_gpu() -> None:
    """The same index is another GPU on another host, or where each task sees one only."""

    def gpu(host: str, uuid: str) -> RankFacts:
        return RankFacts(host, 1, {}, uuid, "cuda:0 (NVIDIA H100)")

    assert differences({0: gpu("n1", "a"), 1: gpu("n1", "b"), 2: gpu("n2", "c")}) == []
    assert differences({0: gpu("n1", "a"), 1: gpu("n1", "b"), 2: gpu("n1", "a")}) == [
        "ranks 0, 2 on n1 use one GPU, cuda:0 (NVIDIA H100): each rank needs its own"
    ]


def test_the_missing_with_their_hosts() -> None:
    """With a host's full name in the one place and its short name in the other."""
    start = Start("job 12", hosts=("n1", "n2", "n3"), rank_hosts=("n1", "n1", "n2", "n2", "n3", "n3"))
    came = {0: RankFacts("n1.example.org", 1), 1: RankFacts("n1", 2), 4: RankFacts("n3", 3)}
    assert absent_lines([2, 3, 5], came, start) == [
        "missing: ranks 2, 3 on n2",
        "missing: rank 5 on n3",
        "no rank came from n2",
    ]
    only_hosts = start._replace(rank_hosts=())
    assert absent_lines([2, 3, 5], came, only_hosts) == ["missing: ranks 2, 3, 5", "no rank came from n2"]
    assert absent_lines([2, 3, 5], came, None) == ["missing: ranks 2, 3, 5"]


def test_thousands_of_missing_ranks_are_a_few_lines() -> None:
    hosts = tuple(f"n{n}" for n in range(2048))
    start = Start("job 12", hosts=hosts, rank_hosts=tuple(host for host in hosts for _ in range(8)))
    lines = absent_lines(range(1, 16384), {0: RankFacts("n0", 1)}, start)
    assert lines[0] == "missing: ranks 1-7 on n0"
    assert lines[-1].endswith("and 2031 more")
    assert len("\n".join(lines)) < 1500
    assert len(ranks_text(range(0, 16384, 2))) < 120

"""What becomes of a verdict: recorded and requeued without the bad node, within a budget, or said why not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fairlead.config_bases import RequeueConfigBase
from fairlead.errors import RunFailedError
from fairlead.facts import Job
from fairlead.interfaces import Requeuer
from fairlead_diagnostics.outcome import Outcome, decide
from fairlead_diagnostics.verdict import Verdict
from fairlead_runs import History, read_history
from fairlead_runs.exclusion import excluded_nodes

HOSTS = {node: f"n{node}" for node in range(8)}


class Plain(Requeuer):
    """One that starts a job again, and knows of no nodes."""

    def requeue(self) -> str:
        return "done"


class Excluding(Plain):
    """One of a scheduler that excludes nodes."""

    refuses = False

    def requeue_without(self, nodes: Sequence[str]) -> str:
        if self.refuses:
            raise RunFailedError("the job could not start", why="2 nodes would be left")
        return f"without {','.join(nodes)}"


class Refusing(Excluding):
    refuses = True


def verdict(*bad: int, unclear: Sequence[str] = ()) -> Verdict:
    return Verdict({node: ["matmul: wrong"] for node in bad}, unclear, (), ())


def decided(found: Verdict, run: Path | None, kind: type[Requeuer] | None = Excluding, **more: Any) -> Outcome:
    def made() -> Requeuer | None:
        return kind(RequeueConfigBase(name="mine"), {}, Job("slurm:7")) if kind is not None else None

    return decide(found, HOSTS, run, made, **more)


def excluded(run: Path) -> list[str]:
    return list(excluded_nodes(read_history(run / "history.jsonl")))


def test_a_bad_node_is_recorded_and_the_job_requeued_without_it_until_the_budget_is_used_up(tmp_path: Path) -> None:
    assert decided(verdict(), tmp_path) == Outcome(0)
    first = decided(verdict(2), tmp_path)
    assert (first.code, first.excluded) == (75, ("n2",))
    assert first.lines == ("requeued without n2 (1 of 3 exclusions used): without n2",)
    assert decided(verdict(4, 5), tmp_path).code == 75
    assert decided(verdict(5), tmp_path).code == 75  # it came again, as the exclusion was lost: no new one
    last = decided(verdict(6), tmp_path)
    assert (last.code, last.excluded) == (1, ())
    assert "n2, n4, n5 excluded already; with n6 it would be 4, and --max-excluded is 3" in last.lines[0]
    assert excluded(tmp_path) == ["n2", "n4", "n5"]


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        (Plain, {}, "the requeuer 'mine' cannot exclude nodes"),
        (None, {}, "nothing requeues this job"),
        (Excluding, {"most": 0}, "excluding nodes is off"),
        (Refusing, {}, "the job could not start: 2 nodes would be left"),
    ],
)
def test_where_it_cannot_be_excluded_it_is_said_why_and_what_to_do(
    tmp_path: Path, kind: type[Requeuer] | None, more: dict[str, Any], why: str
) -> None:
    outcome = decided(verdict(2), tmp_path, kind, **more)
    assert outcome.code == 1
    assert why in outcome.lines[0]
    assert "sbatch --exclude" in outcome.lines[1]
    assert excluded(tmp_path) == []


def test_what_fails_everywhere_excludes_nobody(tmp_path: Path) -> None:
    outcome = decided(verdict(2, unclear=["write fails on every node"]), tmp_path)
    assert (outcome.code, outcome.lines[0]) == (1, "nothing is excluded: another node would not help")
    assert excluded(tmp_path) == []
    assert decided(verdict(2), None).code == 1  # no run whose history could keep it


def test_after_a_week_a_node_is_taken_again(tmp_path: Path) -> None:
    History(tmp_path / "history.jsonl").append("excluded", nodes={"n2": "matmul: wrong"})
    (event,) = read_history(tmp_path / "history.jsonl")
    assert excluded(tmp_path) == ["n2"]
    assert excluded_nodes([{**event, "time": "2020-01-01T00:00:00+00:00"}]) == {}


def test_a_node_whose_name_is_not_known_is_not_excluded(tmp_path: Path) -> None:
    """Some launchers give numbers only, and it never came."""
    outcome = decide(verdict(2), {2: "node 2"}, tmp_path, lambda: None)
    assert outcome.lines[0] == "nothing is excluded: the scheduler's name of node 2 is not known"

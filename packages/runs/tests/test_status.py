"""`fairlead status`: which rank is stuck where, from the heartbeats that the ranks have written."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fairlead import PluginManager
from fairlead.cli import main
from fairlead.cli.session import Session
from fairlead.errors import ConfigError
from fairlead.testing import FakeEntryPoint
from fairlead_runs import Heartbeat, RunDirectory, fingerprint, heartbeat_path
from fairlead_runs.commands import plugins as commands
from fairlead_runs.commands.texts import find_run
from fairlead_runs.waiting import rank_ranges, waits_there

JOB = {"model": {"class": "m:Net"}, "run": {"seed": 0}, "trainer": {"max_steps": 10}}
WAITS = "_engine_run_backward@graph.py:869"
Status = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """A run that started long ago and is held by this process."""
    made = RunDirectory.open(tmp_path / "runs" / "gpt", job=JOB, fingerprint=fingerprint(JOB))
    with made:
        made.begin(resolution={}, provenance={})
        history = made.path / "history.jsonl"
        event = {**json.loads(history.read_text()), "time": "2020-01-01T00:00:00+00:00"}
        history.write_text(json.dumps(event) + "\n")
        yield made


@pytest.fixture
def status(run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Status:
    """What `fairlead status gpt` prints."""
    plugins = PluginManager([FakeEntryPoint("command.status", commands.status)])

    def call(*words: str) -> str:
        assert main(["status", "gpt", *words], plugins=plugins, environ={}, cwd=tmp_path) == 0
        return capsys.readouterr().out

    return call


class Ranks:
    """Writes heartbeats as ranks do, eight on a node, with a clock and a place that the test chooses."""

    def __init__(self, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, per_node: int = 8) -> None:
        self.folder = run.path / "heartbeats"
        self.monkeypatch = monkeypatch
        self.per_node = per_node

    def beat(self, rank: int, step: int, age_s: float, *phases: str, place: str = "", start: int = 1) -> None:
        """The last sign of life of a rank; more than one phase: those that it went through within the step."""
        node, local = divmod(rank, self.per_node)
        writer = Heartbeat(
            heartbeat_path(self.folder, node),
            local,
            rank,
            interval_s=0.02 if place else 100.0,
            still_s=0.0 if place else 100.0,
            start=start,
            host=f"n{node}.cluster",
            now=lambda: time.time() - age_s,
        )
        self.monkeypatch.setattr("fairlead_runs.heartbeat.location_of_thread", lambda _thread: place)
        for phase in phases or ("train",):
            writer.beat(phase, step)
        mine = local * 128
        while place and place.encode() not in (self.folder / f"node-{node:05d}.txt").read_bytes()[mine : mine + 128]:
            time.sleep(0.01)
        writer.close()


@pytest.fixture
def ranks(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(run, monkeypatch)


def test_the_rank_that_is_a_step_behind_is_named_with_where_it_stands(ranks: Ranks, status: Status) -> None:
    for rank in range(8):
        if rank != 3:
            ranks.beat(rank, 42, 312, place=WAITS)
    ranks.beat(3, 41, 313, place="training_step@model.py:88")
    lines = status().splitlines()
    assert lines[0] == "gpt: running"
    table = [line.split() for line in lines if line.startswith(("ranks", "3 ", "0-2"))]
    assert table == [
        ["ranks", "on", "step", "phase", "last", "heartbeat", "stands", "in"],
        ["3", "n0", "41", "train", "5", "min", "ago", "training_step@model.py:88"],
        ["0-2,4-7", "n0", "42", "train", "5", "min", "ago", WAITS],
    ]
    assert lines[-1] == (
        "rank 3 (n0): at step 41 in train since 5 min, in training_step@model.py:88; 7 others: at step 42, waiting"
    )


def test_within_a_step_the_order_of_the_phases_counts(ranks: Ranks, status: Status) -> None:
    """Rank 1 is still in the validation that rank 0 has left: `train` comes before a validation and after it."""
    ranks.beat(0, 5, 30, "train", "validate", "train")
    ranks.beat(1, 5, 30, "train", "validate")
    assert "rank 1 (n0): at step 5 in validate since 30 s; 1 other: further: train" in status()


def test_where_all_are_at_one_step_the_rank_that_does_not_wait_is_named(ranks: Ranks, status: Status) -> None:
    for rank in range(16):
        ranks.beat(rank, 42, 400, place=WAITS if rank != 9 else "acquire@locks.py:3")
    assert status().splitlines()[-1] == (
        "rank 9 (n1): at step 42 in train since 6 min, in acquire@locks.py:3; "
        "15 others: waiting at step 42 at another line of code"
    )


def test_a_rank_without_a_sign_of_life_is_named(ranks: Ranks, status: Status) -> None:
    ranks.beat(0, 20, 400)
    ranks.beat(8, 20, 2)
    assert "rank 0 (n0): at step 20 in train since 6 min; 1 other: alive" in status().splitlines()[-1]


@pytest.mark.parametrize("age_s", [0.0, 5.0])
def test_nobody_is_accused_while_the_run_moves(ranks: Ranks, status: Status, age_s: float) -> None:
    """Records of fast steps are never all of the same moment."""
    for rank in range(8):
        ranks.beat(rank, 1000 + rank, age_s)
    assert json.loads(status("--json"))["behind"] == []
    assert "wait" not in status()


def test_slow_steps_at_one_place_or_many_accuse_nobody(ranks: Ranks, status: Status) -> None:
    for rank in range(4):
        ranks.beat(rank, 7, 300, place=f"forward@model.py:{rank % 2}")
    assert json.loads(status("--json"))["behind"] == []


def test_clocks_that_differ_make_no_nonsense(ranks: Ranks, status: Status) -> None:
    """n1's clock is an hour ahead, n2's was set back; the order of the steps needs no clock."""
    for rank in range(24):
        skew = (0.0, -3600.0, 9000.0)[rank // 8]
        ranks.beat(rank, 8 if rank == 12 else 9, skew + 20, place=WAITS if rank != 12 else "f@m.py:1")
    text = status()
    document = json.loads(status("--json"))
    assert not re.search(r"-\d+ \w+ ago", text)
    assert "rank 12 (n1): at step 8 in train since 0 s, in f@m.py:1; 23 others: at step 9" in text
    assert document["behind"] == [12]
    assert all(rank["age_s"] >= 0 for rank in document["ranks"])


def test_a_rank_whose_clock_is_far_behind_is_still_of_this_start(ranks: Ranks, status: Status) -> None:
    """And one of an earlier start is not, though the clock says so."""
    ranks.beat(0, 3, 10 * 365 * 86400)
    ranks.beat(1, 3, 1, start=7)
    assert [rank["rank"] for rank in json.loads(status("--json"))["ranks"]] == [0]


def test_sixteen_thousand_ranks_fit_on_a_screen(run: RunDirectory, ranks: Ranks, status: Status) -> None:
    ranks.beat(0, 42, 300)
    record = (run.path / "heartbeats" / "node-00000.txt").read_bytes()
    for node in range(2048):
        data = b"".join(_of_rank(record, node * 8 + local, node) for local in range(8))
        (run.path / "heartbeats" / f"node-{node:05d}.txt").write_bytes(data)
    ranks.beat(7, 41, 300)
    text = status()
    assert len(text.splitlines()) < 30
    assert max(map(len, text.splitlines())) < 160
    assert "0-6,8-16383" in text
    assert "rank 7 (n0): at step 41 in train since 5 min; 16383 others: at step 42" in text
    document = json.loads(status("--json"))
    assert (len(document["ranks"]), document["behind"]) == (16384, [7])


def _of_rank(record: bytes, rank: int, node: int) -> bytes:
    words = record[:-10].decode().split()
    words[0], words[6] = str(rank), f"n{node}"
    body = " ".join(words).encode().ljust(118)
    return body + b" %08x\n" % zlib.crc32(body)


def test_scattered_ranks_are_cut_and_groups_are_counted(ranks: Ranks, status: Status) -> None:
    assert rank_ranges([]) == ""
    assert rank_ranges([3]) == "3"
    assert rank_ranges([4, 2, 3, 9]) == "2-4,9"
    assert rank_ranges(range(0, 2000, 2), longest=20) == "0,2,4,6,8,10,12,14 and 992 more"
    for rank in range(48):
        ranks.beat(rank, rank, 1)
    text = status()
    assert "and 28 ranks in 28 more groups; --json has each" in text


def test_a_run_that_hung_until_it_was_killed_still_says_who_hung(
    run: RunDirectory, ranks: Ranks, status: Status
) -> None:
    ranks.beat(0, 6, 9000, place=WAITS)
    ranks.beat(1, 5, 9000, place="sleep_long@model.py:4")
    run.close()
    text = status()
    assert text.startswith("gpt: interrupted")
    assert text.splitlines()[-1].startswith(
        "when the run ended, rank 1 (n0): at step 5 in train, in sleep_long@model.py:4; 1 other: at step 6"
    )


def test_a_run_that_failed_accuses_nobody_by_its_heartbeats(run: RunDirectory, ranks: Ranks, status: Status) -> None:
    """The rank that raised got further than the others, into the phase `failed`."""
    ranks.beat(0, 6, 100, place=WAITS)
    ranks.beat(1, 6, 100, "train", "failed")
    run.history.append("failed", reason="rank 1: ValueError")
    assert json.loads(status("--json"))["behind"] == []


def test_dumps_of_the_last_start_are_named(run: RunDirectory, status: Status) -> None:
    for name in ("stacks/start-1/rank-00000.txt", "stacks/start-2/rank-00000.txt", "stacks/start-2/rank-00001.txt"):
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text("stack")
    (run.path / "flight-recorder/start-2/gloo").mkdir(parents=True)
    (run.path / "flight-recorder/start-2/gloo/rank_1").write_bytes(b"x")
    (run.path / "stacks" / "notes").mkdir()
    assert status().splitlines()[-2:] == [
        "stacks: runs/gpt/stacks/start-2 (2 files)",
        "flight-recorder: runs/gpt/flight-recorder/start-2 (1 file)",
    ]
    assert json.loads(status("--json"))["dumps"][0] == {
        "kind": "stacks", "path": str(run.path / "stacks/start-2"), "files": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("place", "waits"),
    [
        ("barrier@distributed_c10d.py:5356", True),
        ("_engine_run_backward@graph.py:979", True),
        ("wait@mailbox.py:139", True),  # for the end of a save on another rank, which may take its time
        ("write@serialization.py:811", False),
        ("training_step@mine.py:12", False),
    ],
)
def test_where_a_rank_waits_for_others(place: str, waits: bool) -> None:
    assert waits_there(place) is waits


def test_a_run_of_somebody_else_that_may_not_be_read_is_said_to_be_that() -> None:
    """A process of the user `nobody` looks at a run that only its owner may read."""
    if os.getuid() != 0:
        pytest.skip("needs root, to be somebody else")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        run = Path(folder, "runs/gpt")
        with RunDirectory.open(run, job=JOB, fingerprint=fingerprint(JOB)):
            pass
        run.chmod(0o700)
        session = Session(PluginManager([]), {}, Path(folder))
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.setgid(65534)
            os.setuid(65534)
            try:
                find_run("gpt", session)
            except ConfigError as error:
                os.write(writer, error.block().encode())
            os._exit(0)
        os.wait()
        os.close(writer)
        said = os.read(reader, 4096).decode()
        os.close(reader)
    assert "you may not read this run" in said
    assert "it belongs to root" in said
    assert "chmod" in said

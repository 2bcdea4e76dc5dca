"""A stop ends whatever it meets, and says which rank it waits for; a rank that fails before the run ends the others."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fairlead_distributed import free_port
from fairlead_runs import read_heartbeats
from fairlead_runs.states import state
from integration_tests.jobs import JOB, Running, repository, start

pytestmark = pytest.mark.slow

STUCK = """
import os
import time

import torch

from mine.model import Model

WHERE, _, OF = os.environ.get("STUCK", "").partition(":")


def here(place):
    return place == WHERE and os.environ.get("RANK", "0") in OF.split(",")


def hangs():
    while True:
        time.sleep(1)


if here("import"):
    open("stuck", "w").close()
    hangs()


class Slow:
    def __reduce__(self):
        open("stuck", "w").close()
        hangs()


class Stuck(Model):
    def on_save_checkpoint(self, checkpoint):
        if here("pickle"):
            checkpoint["slow"] = Slow()

    def setup(self, stage):
        if here("setup"):
            open("stuck", "w").close()
            hangs()

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        if here("save") and index == 5:  # the ranks' collectives are one apart from here on
            self.log("only", loss, sync_dist=True)
        if here("step") and index == 5:
            open("stuck", "w").close()
            hangs()
        return loss

    def validation_step(self, batch, index):
        if here("validate"):
            open("stuck", "w").close()
            torch.distributed.barrier()
        super().validation_step(batch, index)
"""


def stuck_job(folder: Path, **trainer: Any) -> str:
    settings = {**JOB["trainer"], "max_steps": 1000, "max_epochs": 100, "checkpoint": {"every_n_steps": 5}, **trainer}
    job = repository(folder / "repo", job={**JOB, "model": {"class": "mine.stuck:Stuck"}, "trainer": settings})
    (folder / "repo" / "mine" / "stuck.py").write_text(STUCK)
    return str(job)


def stuck(tmp_path: Path, where: str, **trainer: Any) -> Running:
    """A fit that stands still there."""
    method = "spawn" if where.startswith("import") else "fork-server"  # which imports before there are ranks
    words = ("fit", stuck_job(tmp_path, **trainer), "--start-method", method)
    running = start(*words, cwd=tmp_path, environ={"STUCK": where})
    beats = tmp_path / "runs" / "small" / "heartbeats"

    def all_stand() -> bool:
        there = read_heartbeats(beats)
        return (tmp_path / "stuck").exists() or (len(there) > 1 and all(beat.location for beat in there))

    running.until(all_stand, "the ranks stand still")
    return running


def test_a_deadlock_in_a_save_is_named_and_ends_at_the_second_sigterm(tmp_path: Path) -> None:
    running = stuck(tmp_path, "save:0")
    os.kill(running.process.pid, signal.SIGTERM)
    time.sleep(14)
    os.kill(running.process.pid, signal.SIGTERM)
    began = time.monotonic()
    ended = running.end()
    assert time.monotonic() - began < 12, ended.text
    assert ended.code in (75, 143), ended.text
    waits = r"the stop waits for rank.* \(.*, at \w+@\w+\.py:\d+\).*; in \d+ s the job ends"
    assert re.search(waits, ended.err), ended.err
    assert "not saved there: SIGTERM came again. The newest complete checkpoint is step-00000005" in ended.text
    assert state(tmp_path / "runs" / "small").state == "stopped"


@pytest.mark.parametrize(
    ("signum", "code", "kept"),
    [
        (signal.SIGTERM, 143, "not saved there: SIGTERM came again. The newest complete checkpoint is step-00000005"),
        # Python code hears of it.
        (signal.SIGINT, 130, "stopped by the keyboard. The newest complete checkpoint is step-00000005; the same"),
    ],
)
def test_one_process_that_hangs_ends_when_asked_twice(
    tmp_path: Path, signum: signal.Signals, code: int, kept: str
) -> None:
    running = stuck(tmp_path, "step:0", devices=1, strategy="auto")
    for _ in range(2):
        began = time.monotonic()
        os.kill(running.process.pid, signum)
        time.sleep(1.5)
    ended = running.end()
    assert time.monotonic() - began < 6.5, ended.text
    assert ended.code == code, ended.text
    assert kept in ended.text


def test_a_save_that_hangs_is_named_and_ends_when_asked_twice(tmp_path: Path) -> None:
    running = stuck(tmp_path, "pickle:0", devices=1, strategy="auto")
    os.kill(running.process.pid, signal.SIGTERM)
    time.sleep(14)
    began = time.monotonic()
    os.kill(running.process.pid, signal.SIGTERM)
    ended = running.end()
    assert time.monotonic() - began < 6.5, ended.text
    assert ended.code == 143, ended.text
    assert re.search(r"the stop waits for rank 0 \(saving, at hangs@stuck\.py:\d+\); in \d+ s the job ends", ended.err)
    assert "There is no checkpoint yet: the next start begins anew" in ended.text
    assert "resumes from" not in ended.text


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "at"),
    [
        ("save:0", ""),
        ("validate:1", "validation"),
        ("setup:1", "setting up"),
        ("step:1", "in its step"),
        ("import:0,1", "starting"),
        ("import:1", "starting"),
    ],
)
def test_one_signal_ends_whatever_hangs_within_a_minute_and_a_half(tmp_path: Path, where: str, at: str) -> None:
    running = stuck(tmp_path, where, val_check_interval=6)
    os.kill(running.process.pid, signal.SIGTERM)
    began = time.monotonic()
    ended = running.end()
    assert 8 < time.monotonic() - began < 95, ended.text
    assert ended.code in (75, 143), ended.text
    assert at in ended.text
    assert "the stop waits for" in ended.text or where.startswith("import")
    if where in ("validate:1", "setup:1", "step:1"):
        said = re.search(r"the stop waits for (.*)", ended.text)
        assert said is not None
        assert ("rank 1" in said[1] and "rank 0" not in said[1]) == (where != "validate:1"), said[0]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_fails_before_it_joins_ends_the_others(tmp_path: Path, bad: int) -> None:
    """Under a launcher that, as `srun`, lets each rank end by itself."""
    job = repository(tmp_path / "repo")
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        start(
            "fit",
            str(job),
            cwd=tmp_path,
            environ={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "FAIL": f"init:{bad}:0"},
        )
        for rank in (0, 1)
    ]
    began = time.monotonic()
    ended = [rank.end() for rank in ranks]
    assert time.monotonic() - began < 40
    assert "no luck in __init__" in ended[bad].err
    assert f"rank {bad} on {os.uname().nodename} (pid " in ended[1 - bad].err, ended[1 - bad].err
    assert "failed before it joined the others" in ended[1 - bad].err
    # The error with its frame, on lines of their own: of two ranks one refers to what the other shows.
    assert re.search(r"^  why:   building .* failed$", ended[1 - bad].err, re.MULTILINE), ended[1 - bad].err
    assert re.search(r' File ".*\.py", line \d+, in __init__$', ended[1 - bad].err, re.MULTILINE)
    assert "no luck in __init__" in ended[1 - bad].err

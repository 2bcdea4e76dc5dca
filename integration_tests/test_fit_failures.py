"""A rank that dies takes the others down, and says why; a run that was stopped or has failed goes on afterwards."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fairlead_distributed import free_port
from fairlead_runs import state
from integration_tests.jobs import JOB, Running, events, fairlead, marked, names, repository, start

pytestmark = pytest.mark.slow

SLOW = ("--set", "trainer.max_steps=100000", "--set", "model.args.delay=0.02", "--set", "trainer.max_epochs=-1")


def training(tmp_path: Path, *words: str, fresh: bool = False) -> Running:
    """A fit that has written its first checkpoint and has no end."""
    running = start("fit", str(repository(tmp_path / "repo")), *SLOW, *words, cwd=tmp_path, fresh=fresh)
    running.until(lambda: "checkpoint" in names(tmp_path / "runs" / "small"), "the first checkpoint")
    return running


@pytest.mark.parametrize(
    ("trouble", "first", "says"),
    [
        ("raise:1:3", 1, "ValueError: no luck in the step"),
        ("kill:0:3", 0, "was killed by SIGKILL"),
        ("memory:1:3", 1, "- a batch of 2 on each rank, with accumulate_grad_batches: 2: "),
        pytest.param("exit:1:3", 1, "ended with exit code 7", marks=pytest.mark.full),
        ("hang:1:3 raise:0:3", 0, "ValueError: no luck in the step"),
        pytest.param("segfault:1:3", 1, "mine/model.py", marks=pytest.mark.full),
        pytest.param("validation:1:0", 1, "ValueError: no luck in validation", marks=pytest.mark.full),
        pytest.param("worker:1:0", 1, "no luck in the worker", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_dies_is_named_and_takes_the_others_along(
    tmp_path: Path, trouble: str, first: int, says: str
) -> None:
    job = repository(tmp_path / "repo")
    words = ("fit", str(job), "--set", "data.args.workers=1", "--set", "trainer.val_check_interval=4")
    failed = fairlead(*words, cwd=tmp_path, environ={"FAIL": trouble})
    run = tmp_path / "runs" / "small"
    assert failed.code == 1
    assert failed.err.lstrip().startswith(f"error: rank {first} of 2 "), failed.err
    assert says in failed.err
    assert "the other ranks" in failed.err
    # Only the user's own frames, and at most one of the library that raised.
    assert failed.err.count("site-packages") <= 1 or "segfault" in trouble
    assert "failed" in names(run)
    assert state(run).state == "failed"
    assert not (run / ".lock").exists() or state(run).owner is None


@pytest.mark.full
def test_a_run_that_failed_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    job = str(repository(tmp_path / "repo"))
    run = tmp_path / "runs" / "small"
    assert fairlead("fit", job, cwd=tmp_path, environ={"FAIL": "kill:0:3"}).code == 1
    saved = [event["step"] for event in events(run) if event["event"] == "checkpoint"]
    resumed = fairlead("fit", job, cwd=tmp_path)
    assert resumed.code == 0, resumed.text
    starts = [event for event in events(run) if event["event"] == "start"]
    assert f"step-{max(saved):08d}" in starts[-1]["resumed_from"]
    assert (events(run)[-1]["event"], events(run)[-1]["step"]) == ("finished", 8)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_result_that_cannot_be_saved_is_a_failure_of_the_run(tmp_path: Path, ranks: int) -> None:
    """Not exit code 2, after which a script need not try again; the next start goes on."""
    words = ("fit", str(repository(tmp_path / "repo")), "--set", f"trainer.devices={ranks}")
    failed = fairlead(*words, cwd=tmp_path, environ={"FAIL": "full:0:5"})
    assert failed.code == 1, failed.text
    assert "the state at step 8 could not be saved" in failed.err
    assert "No space left on device" in failed.err
    run = tmp_path / "runs" / "small"
    assert state(run).state == "failed"
    resumed = fairlead(*words, cwd=tmp_path)
    assert resumed.code == 0, resumed.text
    assert "resumes from" in resumed.out
    assert (events(run)[-1]["event"], events(run)[-1]["step"]) == ("finished", 8)


@pytest.mark.full
def test_what_fails_before_the_run_begins_writes_nothing(tmp_path: Path) -> None:
    job = repository(tmp_path / "repo")
    for trouble, says in (
        ("import:1:0", "no luck at import"),
        ("init:0:0 init:1:0", "no luck in __init__"),
    ):
        failed = fairlead("fit", str(job), cwd=tmp_path, environ={"FAIL": trouble})
        assert failed.code == 2
        assert says in failed.err
        assert failed.err.count("error: ") == 1
        assert "mine/model.py" in failed.err
        assert "site-packages" not in failed.err
        assert ("rank:  1 of 2" in failed.err) == ("0:0" not in trouble)  # named where not all say the same
        assert not (tmp_path / "runs").exists()


BROKEN = "\n\nclass Broken(Model):\n    def __init__(self, **_):\n        raise ValueError('no such vocabulary')\n"


@pytest.mark.parametrize(
    ("setting", "what", "line"),
    [
        ("trainer.maxsteps=3", "unknown field 'maxsteps'", "unknown field 'maxsteps' (--set trainer.maxsteps)"),
        ("model.class=mine.model:Broken", "building mine.model:Broken failed", "(ValueError: no such vocabulary)"),
        ("model.args.lr=0.7", "the run directory belongs to a run with other settings", "other settings (/"),
    ],
    ids=["the job", "its code", "the run"],
)
def test_what_all_ranks_of_a_launcher_meet_is_reported_once(tmp_path: Path, setting: str, what: str, line: str) -> None:
    """Of a launcher that, as `srun`, lets each rank end by itself; another rank says one line, after rank 0."""
    job = repository(tmp_path)
    module = tmp_path / "mine" / "model.py"
    module.write_text(module.read_text() + BROKEN)
    if what.startswith("the run"):
        assert fairlead("fit", str(job), "--set", "trainer.max_steps=1", cwd=tmp_path).code == 0
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ("fit", str(job), "--set", setting)
    ranks = [
        start(*words, cwd=tmp_path, environ={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)
    ]
    first, other = [rank.end() for rank in ranks]
    assert (first.code, other.code) == (2, 2), first.text + other.text
    assert first.err.startswith(f"error: {what}\n  where: ")
    (said,) = other.err.splitlines()
    assert said.startswith(f"rank 1 on {os.uname().nodename}: {what} (")
    assert line in said


@pytest.mark.full
def test_setup_that_raises_fails_the_run(tmp_path: Path) -> None:
    failed = fairlead("fit", str(repository(tmp_path / "repo")), cwd=tmp_path, environ={"FAIL": "setup:1:0"})
    assert failed.code == 1
    assert failed.err.lstrip().startswith("error: rank 1 of 2 failed"), failed.err
    assert "no luck in setup" in failed.err
    assert "failed" in names(tmp_path / "runs" / "small")


def test_sigterm_saves_on_all_ranks_together_and_exits_143(tmp_path: Path) -> None:
    running = training(tmp_path, "--set", "trainer.checkpoint.every_n_steps=1000")
    run = tmp_path / "runs" / "small"
    os.kill(running.process.pid, signal.SIGTERM)
    ended = running.end()
    assert ended.code == 143, ended.text
    assert "everything is saved" in ended.text
    assert "Traceback" not in ended.err
    last = [event for event in events(run) if event["event"] in ("checkpoint", "stop")]
    assert {event["event"] for event in last[-2:]} == {"checkpoint", "stop"}
    steps = {event["step"] for event in last[-2:]}
    assert len(steps) == 1
    assert "failed" not in names(run)

    stop = steps.pop() + 1
    words = ("--set", f"trainer.max_steps={stop}", "--set", "trainer.checkpoint.every_n_steps=1000")
    resumed = fairlead("fit", str(tmp_path / "repo/jobs/job.yaml"), *SLOW, *words, cwd=tmp_path)
    assert resumed.code == 0, resumed.text
    assert events(run)[-1]["step"] == stop


@pytest.mark.full
def test_ctrl_c_saves_and_exits_130_without_a_traceback(tmp_path: Path) -> None:
    running = training(tmp_path)
    os.killpg(running.process.pid, signal.SIGINT)  # as a terminal does
    ended = running.end()
    assert ended.code == 130, ended.text
    assert "stopped at step" in ended.text
    assert "Traceback" not in ended.text
    assert "failed" not in names(tmp_path / "runs" / "small")


def test_asked_twice_it_ends_at_once(tmp_path: Path) -> None:
    """The first Ctrl-C waits for the step, which may never end, and says so; the other stops without it."""
    environ = {"FAIL": "hang:1:3"}
    running = start("fit", str(repository(tmp_path / "repo")), *SLOW, cwd=tmp_path, environ=environ)
    running.until((tmp_path / "hanging").exists, "rank 1 hangs")

    for _ in range(2):
        os.killpg(running.process.pid, signal.SIGINT)
        time.sleep(1)  # two signals at once are one
    ended = running.end()
    assert ended.code == 130, ended.text
    assert "SIGINT: stopping after this step, then saving; again to stop now" in ended.err
    assert "Ctrl-C was pressed again" in ended.text
    assert "Traceback" not in ended.text
    assert "failed" not in names(tmp_path / "runs" / "small")
    assert state(tmp_path / "runs" / "small").state == "stopped"


@pytest.mark.full
def test_a_rank_that_hangs_does_not_hold_up_a_stop(tmp_path: Path) -> None:
    """Named after half of the time that there is; another start is asked for, from the newest checkpoint."""
    words = ("--set", "trainer.requeue={name: exit_code, grace_s: 10}", "--set", "trainer.checkpoint.every_n_steps=2")
    job = str(repository(tmp_path / "repo"))
    running = start("fit", job, *SLOW, *words, cwd=tmp_path, environ={"FAIL": "hang:1:3"})
    running.until((tmp_path / "hanging").exists, "rank 1 hangs")
    os.kill(running.process.pid, signal.SIGTERM)
    ended = running.end()
    assert ended.code == 75, ended.text
    assert re.search(r"not saved there: rank 1 did not answer within [1-5](\.\d+)? s", ended.text), ended.text
    run = tmp_path / "runs" / "small"
    assert [event["without"] for event in events(run) if event["event"] == "stop"] == [[1]]
    assert "failed" not in names(run)
    again = fairlead("fit", job, *SLOW, *words, "--set", "trainer.max_steps=6", cwd=tmp_path)
    assert again.code == 0, again.text
    assert "resumes from" in again.out


@pytest.mark.full
def test_a_killed_supervisor_takes_its_ranks_along(tmp_path: Path) -> None:
    running = training(tmp_path, "--set", "data.args.workers=1", fresh=True)
    os.kill(running.process.pid, signal.SIGKILL)
    ended = running.end()  # fails when a process is left
    assert ended.code == -signal.SIGKILL
    words = ("--set", "trainer.max_steps=8")
    job = str(tmp_path / "repo/jobs/job.yaml")
    resumed = fairlead("fit", job, *SLOW, *words, "--set", "data.args.workers=1", cwd=tmp_path)
    assert resumed.code == 0, resumed.text
    assert "resumes from" in resumed.out


@pytest.mark.full
@pytest.mark.parametrize("wrong", [{"model": {"class": "mine.model:Modell"}}, {}], ids=["refused", "stopped"])
def test_what_is_imported_while_the_job_is_checked_ends_with_it(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Begun as a user begins it, so that a process imports torch before it is known that ranks will start."""
    job = repository(tmp_path / "repo", job={**JOB, **wrong})
    running = start("fit", str(job), cwd=tmp_path, fresh=True)
    if wrong:
        call = running.end(20)
        assert call.code == 2
        assert "mine.model:Model?" in call.text
    else:
        running.until(lambda: len(marked(running.marker)) > 1, "it imports")
        running.process.send_signal(signal.SIGTERM)
        assert running.end(60).code == 143
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
def test_one_process_fails_and_stops_as_several_do(tmp_path: Path) -> None:
    job = repository(tmp_path / "repo")
    alone = ("fit", str(job), "--set", "trainer.devices=1")
    failed = fairlead(*alone, cwd=tmp_path, environ={"FAIL": "raise:0:3"})
    assert failed.code == 1
    assert "no luck in the step" in failed.err
    assert "site-packages" not in failed.err
    assert state(tmp_path / "runs" / "small").state == "failed"

    for signum, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        name = f"alone-{code}"
        running = start(*alone, *SLOW, "--set", f"run.name={name}", cwd=tmp_path)
        run = tmp_path / "runs" / name
        running.until(lambda run=run: "checkpoint" in names(run), "the first checkpoint")  # type: ignore[misc]
        os.kill(running.process.pid, signum)
        ended = running.end()
        assert ended.code == code, ended.text
        assert "Traceback" not in ended.text
        assert state(run).state == "stopped"

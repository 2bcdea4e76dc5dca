"""A rank that fails or hangs in a fit that some launcher has started, with no supervisor of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_job import events

from fairlead_distributed import free_port
from fairlead_distributed.testing import without_gloo
from fairlead_launch.forked_child import run_python
from fairlead_launch.forkserver import ForkedProcess, shared
from fairlead_lightning.display.quiet import TORCH_DEFAULTS
from fairlead_runs import read_heartbeats, state

LIMIT_S = 240.0  # only against a test that would hang for ever

SCRIPT = """
import os, sys, time
sys.path.insert(0, {tests!r})
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tiny_job import Line, loader

from fairlead_runs.handoff import Handoff
from fairlead_distributed.process_group import leave_at_exit
from fairlead_distributed.run.session import RunSession
from fairlead_lightning.lifecycle.stuck import StuckRanks

torch.set_num_threads(1)
rank, run = int(os.environ["RANK"]), os.environ["RUN"]


def hangs_here():
    time.sleep(3600)


class Bad(Line):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            trouble(self)
        return super().training_step(batch, batch_idx)


class Watched(L.Callback):
    # the part of a fit that hears of the other ranks

    def __init__(self, session, stuck):
        self.session, self.stuck = session, stuck

    def setup(self, trainer, pl_module, stage):
        leave_at_exit()
        self.session.join(trainer.global_rank, trainer.local_rank, trainer.node_rank)
        self.stuck.connected(trainer)

    def on_train_batch_end(self, trainer, *_):
        self.session.beat("train", trainer.global_step)

    def on_exception(self, trainer, pl_module, exception):
        if not isinstance(exception, SIGTERMException):
            self.session.raised(exception, trainer.global_step, stopped=isinstance(exception, KeyboardInterrupt))
        self.stuck.left_by(exception)

    def on_fit_end(self, trainer, pl_module):
        self.stuck.close()


def fit(limit_s=1200, **settings):
    session = RunSession(Handoff(run, 1, None), dict(), rank=rank)
    stuck = StuckRanks(os.environ, timeout=timedelta(seconds=limit_s), grace=timedelta(seconds=2))
    session.event("start", start=1)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(timeout=timedelta(seconds=limit_s)), max_steps=6,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False, logger=False,
        callbacks=[Watched(session, stuck)], **settings,
    )
    stuck.begin(trainer, session)
    trainer.fit(Bad(), loader(batch_size=2))
    return trainer


"""


class Job:
    """Two processes with the variables of torchrun; forked, as no test is about their start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.processes: list[ForkedProcess] = []

    def end(self, body: str, *, made: bool = True) -> list[tuple[int, str, str]]:
        """Exit code, output and errors of each rank; `made`: in a run directory that is there."""
        if made:
            self.run.mkdir()
        script = self.folder / "train.py"
        script.write_text(SCRIPT.format(tests=str(Path(__file__).parent)) + textwrap.dedent(body))
        shared_by_ranks = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TORCHELASTIC_RUN_ID": "test",
            "RUN": str(self.run),
        }
        for rank in range(2):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": f"error-{rank}.json"}
            environ = {**os.environ, **TORCH_DEFAULTS, **shared_by_ranks, **own}
            with self._said(rank, "out").open("w") as out, self._said(rank, "err").open("w") as err:
                fds = {1: out.fileno(), 2: err.fileno()}
                started = shared().start(run_python, str(script), environ=environ, cwd=self.folder, fds=fds)
            self.processes.append(started)
        try:
            codes = [process.wait(LIMIT_S) for process in self.processes]
        except subprocess.TimeoutExpired:
            for process in self.processes:
                os.kill(process.pid, signal.SIGQUIT)  # all show where they stand
            time.sleep(2)
            said = [self._said(rank, where).read_text() for rank in range(2) for where in ("out", "err")]
            pytest.fail("\n---\n".join(["the ranks did not exit", *said]))
        return [
            (code, without_gloo(self._said(rank, "out").read_text()), self._said(rank, "err").read_text())
            for rank, code in enumerate(codes)
        ]

    def _said(self, rank: int, where: str) -> Path:
        return self.folder / f"rank-{rank}.{where}"

    def stacks(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in sorted((self.run / "stacks" / "start-1").glob("*"))}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for process in made.processes:
        process.kill_group()


def test_an_exception_on_one_rank_ends_the_other_and_is_shown_once(job: Job) -> None:
    """Rank 0 sits in user code for an hour, and its time-out is twenty minutes."""
    (code, _, said), (code_1, _, traceback) = job.end(
        """
        def trouble(model):
            if rank == 1:
                raise ValueError("no luck")
            hangs_here()

        fit()
        """
    )
    assert (code, code_1) == (1, 1), said
    assert f"rank 1 on {os.uname().nodename} failed: ValueError: no luck\n" in traceback
    assert traceback.count("Traceback") == 1
    assert "no luck" not in said  # on the same node
    failed = [event for event in events(job.run) if event["event"] == "failed"]
    assert [(event["rank"], event["error"]) for event in failed] == [(1, "ValueError: no luck")]
    assert list(job.stacks()) == ["rank-00000.txt", "rank-00001.txt"]
    assert "in hangs_here" in job.stacks()["rank-00000.txt"]


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        ("raise ValueError('no luck')", "ValueError: no luck"),
        ("raise ConnectionResetError('Connection reset by peer: the data server')", "ConnectionResetError: Connection"),
        ("os.kill(os.getpid(), 9)", "rank 1 exited without an error report"),
    ],
)
def test_a_rank_that_lost_its_peer_is_not_blamed(job: Job, trouble: str, error: str) -> None:
    """Rank 0 is in a collective, and fails of gloo's `Connection closed by peer`; torchrun would name it first."""
    (_, _, said), (_, _, traceback) = job.end(
        f"""
        def trouble(model):
            if rank == 1:
                {trouble}

        fit()
        """
    )
    both = said + traceback
    lines = [line for line in both.splitlines() if line.startswith(("rank ", "a rank "))]
    # Where rank 1's exit takes longer, its connection is still open: rank 0 says that it does not wait for it.
    (told,) = [line for line in lines if not line.startswith("rank 0 ends, 2 s after that")]
    assert error in told
    assert both.count("Traceback") == (0 if "kill" in trouble else 1), both
    assert "gloo/transport" not in both
    failed = [event for event in events(job.run) if event["event"] == "failed"]
    assert [(event["rank"], event["error"].startswith(error)) for event in failed] == [(1, True)]
    assert error in state(job.run).reason
    assert [path.name for path in job.folder.glob("error-*")] == ([] if "kill" in trouble else ["error-1.json"])


def test_a_time_out_of_a_collective_leaves_the_stacks_of_the_rank_that_never_came(job: Job) -> None:
    """In the backward pass of the other, where no Python frame says `all_reduce`."""
    ranks = job.end(
        """
        def trouble(model):
            if rank == 1:
                hangs_here()

        fit(limit_s=8)
        """
    )
    assert [code for code, _, _ in ranks] == [1, 1]
    assert "in hangs_here" in job.stacks()["rank-00001.txt"]
    # Before the time-out, and once more after it.
    assert job.stacks()["rank-00001.txt"].count("does not move") >= 1
    assert "_engine_run_backward" in job.stacks()["rank-00000.txt"]
    assert {path.name for path in (job.run / "flight-recorder").glob("start-1/gloo/*")} == {"rank_0", "rank_1"}
    assert {"hang", "failed"} <= {event["event"] for event in events(job.run)}
    last = read_heartbeats(job.run / "heartbeats")
    assert [(beat.rank, beat.host) for beat in last] == [(rank, os.uname().nodename[:20]) for rank in range(2)]


def test_an_exception_that_the_script_catches_ends_nobody(job: Job) -> None:
    """All ranks raise, one long after the other, and each goes on by itself."""
    ranks = job.end(
        """
        def trouble(model):
            time.sleep(4 * rank)  # longer than the grace
            raise ValueError("too large")

        try:
            fit()
        except ValueError:
            print("smaller then")
        """
    )
    assert [(code, out) for code, out, _ in ranks] == [(0, "smaller then\n")] * 2, ranks
    assert job.stacks() == {}


def test_an_exception_that_one_rank_catches_does_not_leave_the_others_waiting(job: Job) -> None:
    """Rank 0 goes on by itself, while the other is in a collective with it, whose time-out is twenty minutes."""
    (code, out, _), (code_1, _, said) = job.end(
        """
        def trouble(model):
            if rank == 0:
                raise ValueError("too large")

        try:
            fit()
        except ValueError:
            deadline = time.monotonic() + 60
            while not Path(run, "stacks/start-1/rank-00001.txt").exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            print("smaller then")
        """
    )
    assert (code, out) == (0, "smaller then\n")
    assert code_1 == 1
    assert f"rank 0 on {os.uname().nodename} has left the training: ValueError: too large" in said


@pytest.mark.parametrize("ends", ["pass", "model.trainer.should_stop = True", "raise SIGTERMException"])
def test_a_fit_that_ends_or_is_stopped_dumps_nothing(job: Job, ends: str) -> None:
    ranks = job.end(
        f"""
        from lightning.pytorch.utilities.exceptions import SIGTERMException

        def trouble(model):
            {ends}

        try:
            fit()
        finally:
            time.sleep(4 * rank)  # the other one, which hosts the store, is long gone
        """
    )
    assert [code for code, _, _ in ranks] == [0, 0], ranks
    assert job.stacks() == {}
    assert "does not move" not in ranks[0][2]


def test_what_calls_exit_is_a_failure_of_its_rank(job: Job) -> None:
    ranks = job.end(
        """
        def trouble(model):
            sys.exit(3) if rank == 1 else hangs_here()

        fit()
        """
    )
    assert [code for code, _, _ in ranks] == [1, 3]
    assert "failed: SystemExit: 3" in ranks[1][2]


def test_a_loop_of_ones_own_blames_no_victim_either(job: Job) -> None:
    """Rank 0 loses rank 1 in a collective; one traceback, of the rank that failed, and one failure in the history."""
    (code, _, said), (code_1, _, traceback) = job.end(
        """
        import lightning.fabric as lf
        from fairlead import Run

        fabric = lf.Fabric(accelerator="cpu", devices=2)
        fabric.launch()
        with Run(run, model=fabric.setup(torch.nn.Linear(1, 1))) as loop:
            loop.restore()
            if rank == 1:
                raise ValueError("no luck")
            fabric.barrier()
            torch.distributed.all_reduce(torch.zeros(1))
        """,
        made=False,
    )
    both = said + traceback
    assert (code, code_1) == (1, 1), both
    assert both.count("Traceback") == 1, both
    assert "ValueError: no luck" in traceback
    assert "gloo/transport" not in both
    failed = [event for event in events(job.run) if event["event"] == "failed"]
    assert [(event["rank"], event["error"]) for event in failed] == [(1, "ValueError: no luck")]

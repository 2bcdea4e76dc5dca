"""A fit that is asked to stop, in one process: what it saves, what it says, who starts it again, and how it ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import Logger
from tiny_job import Data, Line, checkpoints, events, fit, latest, loader, make_trainer, metric_rows, plain
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fairlead import Fairlead, RunConfig
from fairlead.errors import CheckpointError
from fairlead_hpc_signals import OutliveStops, PreemptionGuard, SignalFlags
from fairlead_lightning.commands.local import hold_signals

AGAIN = {"name": "command", "argv": ["sh", "-c", "echo again >> asked"]}


class Asked(Line):
    """Gets a signal at a place, unless there is none."""

    place, number, at = "", int(signal.SIGUSR1), 5

    def _here(self, place: str) -> None:
        if place == self.place and self.trainer.global_step == self.at:
            self.place = ""
            os.kill(os.getpid(), self.number)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._here("step")

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._here("sanity" if self.trainer.sanity_checking else "validation")

    def prepare_data(self) -> None:
        self._here("data")

    def setup(self, stage: str) -> None:
        self._here("setup")

    def on_fit_start(self) -> None:
        self._here("restored")

    def on_train_start(self) -> None:
        self._here("begin")

    def on_train_epoch_end(self) -> None:
        self._here("epoch end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._here("save")


def asked(place: str, number: int = signal.SIGUSR1, at: int = 5, kind: type[Asked] = Asked) -> Asked:
    """Not by arguments: a start that is not asked belongs to the same run."""
    model = kind()
    model.place, model.number, model.at = place, number, at
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Line, list[dict[str, str]]]:
    """Three epochs without a stop."""
    root = tmp_path_factory.mktemp("whole")
    return fit(root, max_epochs=3), metric_rows(root / "run")


PLACES = {  # and the step at which it stops
    "data": (0, 0),
    "setup": (0, 0),
    "restored": (0, 0),
    "sanity": (0, 0),
    "begin": (0, 0),
    "step": (5, 6),
    "epoch end": (8, 8),
    "validation": (8, 8),
    "save": (8, 8),
}


class Unclosable(Logger):
    """As one whose server has gone."""

    name, version = "unclosable", 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None: ...

    def finalize(self, status: str) -> None:
        raise ConnectionResetError("the server has gone")


def test_a_logger_that_cannot_be_closed_does_not_end_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """It is said, and the job is started again."""
    monkeypatch.chdir(tmp_path)
    callback = Fairlead(RunConfig(name="run", dir=str(tmp_path)), requeue=AGAIN)
    trainer = plain(max_epochs=1, callbacks=[callback], logger=Unclosable())
    with pytest.raises(SystemExit) as ended:
        trainer.fit(asked("step"), datamodule=Data())
    assert ended.value.code == 75
    assert [event["by"] for event in events(tmp_path / "run", "requeue")] == ["command"]
    assert "Unclosable could not be closed: ConnectionResetError: the server has gone" in capfd.readouterr().err


@pytest.mark.parametrize("place", PLACES)
def test_wherever_it_is_asked_it_goes_on_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, whole: tuple[Line, list[dict[str, str]]]
) -> None:
    """Saved, started again by command, and the same weights as if nothing had happened."""
    monkeypatch.chdir(tmp_path)
    at, stops = PLACES[place]
    sanity = 2 if place == "sanity" else 0
    settings: dict[str, Any] = {"max_epochs": 3, "requeue": AGAIN, "num_sanity_val_steps": sanity}
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, model=asked(place, at=at), **settings)
    assert ended.value.code == 75
    run = tmp_path / "run"
    (stop,) = events(run, "stop")
    assert (stop["step"], stop["reason"]) == (stops, "unknown")
    assert [event["signals"] for event in events(run, "signal")] == [["SIGUSR1"]]
    assert [event["by"] for event in events(run, "requeue")] == ["command"]
    assert (tmp_path / "asked").read_text() == "again\n"
    if stops:
        assert latest(run).step == stops
    else:
        assert not events(run, "checkpoint")
    again = fit(tmp_path, model=Asked(), **settings)
    model, rows = whole
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
    assert metric_rows(run) == rows


class Halved(Asked):
    """Validates other weights than it trains, as averages of them."""

    def _times(self, factor: float) -> None:
        for weight in self.parameters():
            weight.data.mul_(factor)

    def on_validation_epoch_start(self) -> None:
        self._times(0.5)

    def on_validation_epoch_end(self) -> None:
        self._times(2.0)


def test_weights_that_only_a_validation_has_are_not_saved(
    tmp_path: Path, whole: tuple[Line, list[dict[str, str]]]
) -> None:
    """The stop waits for its end."""
    with pytest.raises(SystemExit):
        fit(tmp_path, model=asked("validation", at=8, kind=Halved), max_epochs=3)
    assert latest(tmp_path / "run").step == 8
    resumed = fit(tmp_path, model=Halved(), max_epochs=3)
    assert all(map(torch.equal, whole[0].parameters(), resumed.parameters()))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 143)])
def test_without_a_requeuer_the_code_says_that_it_ended(tmp_path: Path, number: int, code: int) -> None:
    """On a workstation nobody starts it again."""
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, model=asked("step", number), max_steps=20)
    assert ended.value.code == code
    assert latest(tmp_path / "run").step == 6
    assert not events(tmp_path / "run", "requeue")


def test_a_code_of_its_own_asks_for_another_start(tmp_path: Path) -> None:
    """As Kubernetes wants it."""
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, model=asked("step"), max_steps=20, requeue={"name": "exit_code", "code": 200})
    assert ended.value.code == 200
    assert events(tmp_path / "run", "requeue")
    last = {"name": "exit_code", "code": 200, "final_code": 3, "max_requeues": 1}
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, model=asked("step", at=8), max_steps=20, requeue=last)
    assert ended.value.code == 3  # its budget is used up, and 143 would start it once more


def test_only_so_many_requeues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The third stop is final, and says so."""
    monkeypatch.chdir(tmp_path)
    codes = []
    for number in range(3):
        with pytest.raises(SystemExit) as ended:
            fit(tmp_path, model=asked("step", at=2 + number), max_steps=20, requeue={**AGAIN, "max_requeues": 2})
        codes.append(ended.value.code)
    assert codes == [75, 75, 143]
    assert "max_requeues is 2" in capsys.readouterr().out
    assert (tmp_path / "asked").read_text() == "again\n" * 2
    assert events(tmp_path / "run", "stop")[-1]["stops_before"] == {"unknown": 2}


def test_starts_that_come_to_nothing_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """It would be requeued for ever."""
    monkeypatch.chdir(tmp_path)
    codes = []
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            fit(tmp_path, model=asked("setup", at=0), max_steps=20, requeue={**AGAIN, "max_without_progress": 2})
        codes.append(ended.value.code)
    assert codes == [75, 143]
    assert "took no training step" in capsys.readouterr().out


def test_a_requeue_that_fails_is_told(tmp_path: Path, capsys: Any) -> None:
    """Everything is saved all the same; the code still says that a start is wanted."""
    with pytest.warns(UserWarning, match="no-such-program"), pytest.raises(SystemExit) as ended:
        fit(tmp_path, model=asked("step"), max_steps=20, requeue={"name": "command", "argv": ["no-such-program"]})
    assert ended.value.code == 75
    assert "does not restart by itself" in capsys.readouterr().out
    assert "no-such-program" in events(tmp_path / "run", "requeue-failed")[0]["error"]
    assert latest(tmp_path / "run").step == 6


def test_a_disk_that_refuses_the_last_save_does_not_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The next start goes on from the checkpoint before, and everybody is told."""
    monkeypatch.chdir(tmp_path)

    class Broken(Asked):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self.trainer.global_step > 4:
                raise CheckpointError("cannot write state.ckpt", why="No space left on device")

    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, model=asked("step", kind=Broken), max_steps=20, requeue=AGAIN, checkpoint={"every_n_steps": 4})
    assert ended.value.code == 75
    assert (tmp_path / "asked").read_text() == "again\n"
    assert latest(tmp_path / "run").step == 4
    assert "not saved there: rank 0: " in capsys.readouterr().out


def test_a_bug_in_the_last_save_requeues_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would come again for ever."""
    monkeypatch.chdir(tmp_path)

    class Broken(Asked):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            raise TypeError("a wrong argument")

    with pytest.raises(TypeError, match="a wrong argument"):
        fit(tmp_path, model=asked("step", kind=Broken), max_steps=20, requeue=AGAIN)
    assert not (tmp_path / "asked").exists()
    assert events(tmp_path / "run")[-1]["event"] == "failed"


def test_a_second_fit_listens_again(tmp_path: Path) -> None:
    """And after a fit that was not asked, the handlers of before are there again."""
    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(tmp_path, max_steps=3)
    trainer.fit(Line(), datamodule=Data())
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(SystemExit):
        fit(tmp_path, run={"name": "second"}, model=asked("step", signal.SIGTERM), max_steps=20)
    assert latest(tmp_path / "second").step == 6


def test_a_handler_put_over_ours_is_a_finding(tmp_path: Path, capsys: Any) -> None:
    """FIELD: libraries do this, and the job dies without a checkpoint."""

    class Takes(Line):
        def on_fit_start(self) -> None:
            signal.signal(signal.SIGUSR1, lambda *_: None)

    fit(tmp_path, model=Takes(), max_steps=2)
    assert "warning[signal-handler-replaced]: SIGUSR1" in capsys.readouterr().out
    assert [event["signal"] for event in events(tmp_path / "run", "signal-handler-replaced")] == ["SIGUSR1"]


def test_a_warning_before_the_fit_ends_it_at_its_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a job: while the script still prepares, SIGUSR1 would end a process that does not handle it."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(tmp_path, max_steps=20, requeue=AGAIN)
    os.kill(os.getpid(), signal.SIGUSR1)
    model = Line()
    with pytest.raises(SystemExit) as ended:
        trainer.fit(model, datamodule=Data())
    assert ended.value.code == 75
    assert model.seen == []


def test_a_trainer_that_is_not_in_the_main_thread(tmp_path: Path, capsys: Any) -> None:
    """Its handlers are installed by the main thread and handed over; without that it says that it hears nothing."""

    def in_thread(run: Callable[[], object]) -> list[BaseException]:
        raised: list[BaseException] = []

        def target() -> None:
            try:
                run()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=target)
        thread.start()
        thread.join(60)
        return raised

    assert in_thread(lambda: fit(tmp_path, max_steps=2)) == []
    assert "warning[signals-unheard]" in capsys.readouterr().out
    with SignalFlags() as flags:
        guard = PreemptionGuard(flags=flags)

        def run() -> None:
            fab = Fairlead(tmp_path / "threaded", guard=guard)
            plain(max_steps=20, callbacks=[fab]).fit(asked("step"), datamodule=Data())

        (error,) = in_thread(run)
    assert isinstance(error, SystemExit)
    assert 5 <= latest(tmp_path / "threaded").step < 20  # the main thread handles it when it comes to


def test_the_callback_in_a_script_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A Lightning Trainer of the user's own."""
    monkeypatch.chdir(tmp_path)

    def start(model: Line) -> Line:
        callback = Fairlead(RunConfig(name="run", dir=str(tmp_path)), requeue=AGAIN)
        plain(max_epochs=3, callbacks=[callback]).fit(model, datamodule=Data())
        return model

    with pytest.raises(SystemExit) as ended:
        start(asked("step"))
    assert ended.value.code == 75
    assert "the job restarts (" in capsys.readouterr().out
    run = tmp_path / "run"
    assert [e["event"] for e in events(run)][-4:] == ["signal", "checkpoint", "stop", "requeue"]
    again = start(Asked())
    undisturbed = Line()
    plain(max_epochs=3, callbacks=[Fairlead(tmp_path / "whole")]).fit(undisturbed, datamodule=Data())
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), undisturbed.parameters(), strict=True))


@pytest.mark.full
def test_spawned_ranks_stop_together(tmp_path: Path) -> None:
    """`ddp_spawn`: the scheduler signals the process that only waits for them."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
            import os, signal, sys, time
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            import lightning.pytorch as L
            from tiny_job import Data, Line, make_trainer
            from pathlib import Path

            class Tells(L.Callback):
                def on_train_batch_end(self, trainer, *args):
                    if trainer.global_step == 3 and trainer.is_global_zero:
                        os.kill(os.getppid(), signal.SIGUSR1)
                    time.sleep(0.1)

            if __name__ == "__main__":
                trainer = make_trainer(
                    Path({str(tmp_path)!r}), devices=2, strategy="ddp_spawn", max_steps=1000,
                    requeue={{"name": "exit_code"}},
                )
                trainer.callbacks.append(Tells())
                trainer.fit(Line(), datamodule=Data())
            """)
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 75, ended.stdout + ended.stderr
    run = tmp_path / "run"
    (stop,) = events(run, "stop")
    assert latest(run).step == stop["step"] >= 3
    assert events(run, "requeue")


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """Takes its time; in a worker, in the eleventh batch, all processes are asked to stop."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 40 and not Path("asked").exists():
            Path("asked").touch()
            os.kill(os.getpid(), self.number)
            os.kill(os.getppid(), self.number)
            time.sleep(0.5)  # if the signal ends this worker, it does so here
        x = torch.full((3,), float(index))
        return x, x.sum(0, keepdim=True)


@pytest.mark.parametrize(
    ("start_method", "number"),
    [
        ("fork", signal.SIGUSR1),
        ("fork", signal.SIGTERM),
        ("fork", signal.SIGINT),
        pytest.param("spawn", signal.SIGTERM, marks=pytest.mark.full),
    ],
)
def test_the_workers_of_a_loader_outlive_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, start_method: str
) -> None:
    """A scheduler signals all processes of a job: without its workers the fit cannot come to the end of the step."""
    monkeypatch.chdir(tmp_path)
    data = DataLoader(
        Slow(number),
        batch_size=4,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=start_method,
        worker_init_fn=_started,
    )
    with pytest.raises(SystemExit) as ended:
        make_trainer(tmp_path, max_steps=16, requeue={"name": "exit_code"}).fit(Line(), data, loader())
    assert ended.value.code == (130 if number == signal.SIGINT else 75)
    assert checkpoints(tmp_path / "run")[-1].step >= 1
    assert sorted(path.name for path in tmp_path.glob("worker-*")) == ["worker-0", "worker-1"]  # theirs is called too


def _started(worker: int) -> None:
    Path(f"worker-{worker}").touch()


class SignalledAtItsStart(Slow):
    """A spawned worker gets the signal while it is made, before anything of ours runs there."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGUSR1, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_worker_that_just_starts_outlives_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "asked").touch()  # none comes later
    slow = SignalledAtItsStart(number)
    data = DataLoader(slow, batch_size=4, num_workers=1, persistent_workers=True, multiprocessing_context="spawn")
    make_trainer(tmp_path, max_steps=4, requeue={"name": "exit_code"}).fit(Line(), data, loader())
    assert latest(tmp_path / "run").step == 4


def test_a_worker_that_its_loader_ends_does_end(tmp_path: Path) -> None:
    """It hangs, and the loader's own SIGTERM is what is left."""
    made = OutliveStops(["SIGTERM", "SIGUSR1"])
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def worker() -> None:
        made(0)
        ready.set()
        time.sleep(600)

    process = context.Process(target=worker)
    process.start()
    assert ready.wait(60)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGUSR1)
    subprocess.run(["kill", "-TERM", str(process.pid)], check=True)  # not from its parent
    process.join(1.0)
    assert process.is_alive()
    process.terminate()
    process.join(60)
    assert process.exitcode == 0


def test_a_signal_before_anything_is_ready_is_kept() -> None:
    """`fairlead fit` is still reading the job: SIGUSR1 would end it."""
    with SignalFlags(["SIGUSR1"]) as flags:
        flags.uninstall()
        with hold_signals() as release:
            os.kill(os.getpid(), signal.SIGUSR1)
            came = release()
            flags.install()
            for number in came:
                signal.raise_signal(number)
        assert flags.counts == {"SIGUSR1": 1}

    def nobody_takes_it() -> None:
        with hold_signals():
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):  # it comes behind the block
        nobody_takes_it()


def test_in_a_hurry_the_history_still_comes_before_the_requeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four seconds of grace: loggers are not closed, but the requeue may end the process. FAKE scontrol."""
    monkeypatch.chdir(tmp_path)
    now, end = (time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + late)) for late in (0, 4))
    fake = tmp_path / "scontrol"
    fields = f"JobState=RUNNING Reason=None Requeue=1 BatchFlag=1 Restarts=0 EndTime={end} PreemptTime={now}"
    fake.write_text(f"#!/bin/sh\necho JobId=17 {fields}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    seen = {"name": "command", "argv": ["sh", "-c", "cp run/history.jsonl seen.jsonl"]}
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, model=asked("step"), max_steps=20, requeue=seen)
    assert ended.value.code == 75
    told = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert [event["event"] for event in told[-2:]] == ["stop", "requeue"]
    assert told[-2]["reason"] == "preempted"

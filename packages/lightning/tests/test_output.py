"""Output that cannot be written: a reader that has gone, a full disk. The training goes on, in a process of its own."""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_job import Data, Line, events, make_trainer
from torch import Tensor

from fairlead_runs.lasting_output import give_output_back, keep_output

FORKS = multiprocessing.get_context("forkserver")  # a fork of a process that has trained may wait for its threads
FORKS.set_forkserver_preload(["lightning.pytorch"])


class Prints(Line):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        print("a line of the user's", batch_idx, flush=batch_idx % 2 == 0)
        print("x" * 10_000, file=sys.stderr)
        return super().training_step(batch, batch_idx)


def train_into(where: str, folder: Path) -> None:
    """A fit whose output goes to a file that refuses it."""
    if where == "closed pipe":
        read, fd = os.pipe()
        os.close(read)
    else:
        fd = os.open("/dev/full", os.O_WRONLY)
    for number in (1, 2):
        os.dup2(fd, number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115 - for the process
    trainer = make_trainer(folder, max_steps=12, progress_interval=0.001, enable_progress_bar=True)
    trainer.fit(Prints(), datamodule=Data())


@pytest.mark.parametrize("where", ["closed pipe", "full disk"])
def test_output_that_cannot_be_written_does_not_end_a_training(tmp_path: Path, where: str) -> None:
    """Neither that of the display nor the user's own."""
    process = FORKS.Process(target=train_into, args=(where, tmp_path))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert [event["step"] for event in events(tmp_path / "run", "finished")] == [12]


class Stops(Prints):
    """Asked to stop at its fifth step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 4:
            signal.raise_signal(signal.SIGTERM)
        return super().training_step(batch, batch_idx)


class Hangs(Prints):
    """And does not come back from it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 4:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(60)
        return super().training_step(batch, batch_idx)


def train_without_files(where: str, model: type[Prints], folder: Path) -> None:
    """A fit in a process whose output is no file: a notebook's, `redirect_stderr`, or none at all as a daemon's."""
    if where == "closed":
        os.closerange(1, 3)
    sys.stdout = sys.stderr = None if where == "closed" else io.StringIO()
    faulthandler.disable()  # whoever started this process may have enabled it
    requeue = {"name": "none", "grace_s": 4.0}
    trainer = make_trainer(folder, max_steps=12, progress_interval=0.001, enable_progress_bar=True, requeue=requeue)
    trainer.fit(model(), datamodule=Data())


@pytest.mark.parametrize("where", ["in memory", "closed"])
@pytest.mark.parametrize(
    ("model", "code", "end"), [(Prints, 0, "finished"), (Stops, 143, "stop"), (Hangs, 143, "stop")]
)
def test_output_that_is_no_file_does_not_end_a_training(
    tmp_path: Path, where: str, model: type[Prints], code: int, end: str
) -> None:
    process = FORKS.Process(target=train_without_files, args=(where, model, tmp_path))
    process.start()
    process.join(60)
    assert process.exitcode == code
    assert events(tmp_path / "run")[-1]["event"] == end


def test_the_exit_code_stays() -> None:
    """Python would end with 120 where its last flush fails."""
    script = """
import sys
from fairlead_runs.lasting_output import give_output_back, keep_output
keep_output()
print("lost" * 10_000)
give_output_back()
sys.exit(75)
"""
    with open("/dev/full", "w") as full:
        code = subprocess.run([sys.executable, "-c", script], stdout=full, timeout=60).returncode
    assert code == 75


def test_what_c_code_says_does_not_get_into_a_file(tmp_path: Path) -> None:
    """A file that is opened while stderr is closed gets its number: a checkpoint, say."""
    script = """
import os, sys
from fairlead_runs.lasting_output import keep_output
os.closerange(1, 3)
keep_output()
with open("checkpoint", "wb", buffering=0) as file:
    file.write(b"whole")
    os.write(1, b"gloo says")
    os.write(2, b"so does NCCL")
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=60, check=True)
    assert (tmp_path / "checkpoint").read_bytes() == b"whole"


def test_it_is_a_stream_like_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the old one is back after it; one that somebody has put over it stays."""
    one, other = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", one)
    keep_output()
    keep_output()
    print("shown")
    sys.stdout.writelines(["and ", "this"])
    assert not sys.stdout.isatty()
    assert one.getvalue() == "shown\nand this"
    give_output_back()
    assert sys.stdout is one
    keep_output()
    monkeypatch.setattr(sys, "stdout", other)
    give_output_back()
    assert sys.stdout is other

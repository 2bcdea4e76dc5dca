"""What the tests of the command line share: a user's repository with a small job, and real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairlead_launch.forkserver import ForkedProcess, start_variables
from integration_tests.forked import fork

FAIRLEAD = str(Path(sys.executable).parent / "fairlead")
MARKER = "FAIRLEAD_TEST_MARKER"
LIMIT_S = 300.0  # only against a test that would hang for ever

MODEL = '''
"""A model that fails on demand: FAIL="how:rank:step how:rank:step"."""

import ctypes
import os
import signal
import time

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, Dataset



def asked():
    me = os.environ.get("RANK", "0")
    words = [word.split(":") for word in os.environ.get("FAIL", "").split()]
    return next(((how, int(step)) for how, rank, step in words if rank == me), ("", 0))


if "import" in os.environ.get("FAIL", "") and asked()[0] == "import":
    raise RuntimeError("no luck at import")


def trouble(what):
    if what == "raise":
        return helper()
    if what == "memory":
        return torch.empty(1 << 55)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "once" and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        os._exit(7)
    if what == "segfault":
        ctypes.string_at(0)
    if what == "hang":  # in native code, with the interpreter's lock: no signal handler of Python's ever runs
        open("hanging", "w").close()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # which would end the sleep
        ctypes.PyDLL(None).sleep(3600)
    if what == "full":  # from now on, for checkpoints
        from fairlead_runs.commit import Syscalls

        fsync = Syscalls.fsync

        def refused(self, fd):
            if "checkpoints" in os.readlink(f"/proc/self/fd/{fd}"):
                raise OSError(28, "No space left on device")
            fsync(self, fd)

        Syscalls.fsync = refused


def helper():
    raise ValueError("no luck in the step")


class Samples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if asked()[0] == "worker" and index > 8:
            raise KeyError("no luck in the worker")
        return torch.full((4,), index / 64.0)


class Data(L.LightningDataModule):
    def __init__(self, workers=0):
        super().__init__()
        self.workers = workers

    def train_dataloader(self):
        return DataLoader(Samples(), batch_size=4, num_workers=self.workers)

    def val_dataloader(self):
        return DataLoader(Samples(), batch_size=16)

    test_dataloader = predict_dataloader = val_dataloader


class Model(L.LightningModule):
    def __init__(self, width=4, lr=0.1, delay=0.0):
        super().__init__()
        if asked()[0] == "init":
            raise ValueError("no luck in __init__")
        self.layer = torch.nn.Linear(4, width)
        self.lr, self.delay = lr, delay

    def setup(self, stage):
        if asked()[0] == "setup":
            raise ValueError("no luck in setup")

    def training_step(self, batch, index):
        how, step = asked()
        if self.trainer.global_step >= step:
            trouble(how)
        time.sleep(self.delay)
        loss = self.layer(batch).square().mean()
        self.log("train/loss", loss)
        return loss

    def on_train_end(self):
        if os.environ.get("WEIGHTS"):
            torch.save(self.state_dict(), f"weights-{self.global_rank}.pt")

    def validation_step(self, batch, index):
        if asked()[0] == "validation":
            raise ValueError("no luck in validation")
        self.log("val/loss", self.layer(batch).square().mean(), sync_dist=True)

    def test_step(self, batch, index):
        self.log("test/loss", self.layer(batch).square().mean(), sync_dist=True)

    def predict_step(self, batch, index):
        return self.layer(batch).sum(dim=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)
'''

JOB: dict[str, Any] = {
    "run": {"name": "small", "dir": "runs", "seed": 1},
    "model": {"class": "mine.model:Model", "args": {"width": 4}},
    "data": {"class": "mine.model:Data"},
    "trainer": {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": "ddp",
        "max_steps": 8,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "enable_model_summary": False,
        "checkpoint": {"every_n_steps": 2},
    },
}


def repository(folder: Path, *, job: Mapping[str, Any] | None = None, mark: str = "pyproject.toml") -> Path:
    """Writes a user's repository and returns its job file, `jobs/job.yaml`."""
    (folder / "mine").mkdir(parents=True)
    (folder / mark).touch()
    (folder / "mine" / "__init__.py").touch()
    (folder / "mine" / "model.py").write_text(MODEL)
    (folder / "jobs").mkdir()
    file = folder / "jobs" / "job.yaml"
    file.write_text(json.dumps(job or JOB, indent=1))  # JSON is YAML
    return file


def changed(base: Mapping[str, Any], **sections: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a job in which some settings of a section are others."""
    return {**base, **{name: {**base.get(name, {}), **settings} for name, settings in sections.items()}}


@dataclass
class Call:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


@dataclass
class Running:
    """A command that runs in a process group of its own, as from a terminal."""

    process: subprocess.Popen[str] | ForkedProcess
    marker: str
    cwd: Path
    _files: tuple[Path, Path] = field(repr=False)

    def until(self, there: Callable[[], bool], what: str) -> None:
        """Waits for something to happen; fails when the command ends before."""
        deadline = time.monotonic() + LIMIT_S
        while not there():
            assert self.process.poll() is None, f"ended before {what}: {self.read()}"
            assert time.monotonic() < deadline, f"waited in vain until {what}: {self.read()}"
            time.sleep(0.05)

    def read(self) -> Call:
        out, err = (path.read_text() for path in self._files)
        return Call(self.process.returncode if self.process.returncode is not None else -999, out, err)

    def end(self, limit_s: float = LIMIT_S) -> Call:
        """Waits for the end; nothing of the command may be left then."""
        try:
            self.process.wait(limit_s)
            gone(self.marker)
        except subprocess.TimeoutExpired:
            left = "\n".join(map(_shown, marked(self.marker)))
            raise AssertionError(f"runs after {limit_s:.0f} s:\n{left}\n{self.read().text}") from None
        finally:
            for pid in marked(self.marker):
                os.kill(pid, signal.SIGKILL)
        return self.read()


def start(
    *words: str,
    cwd: Path,
    environ: Mapping[str, str] | None = None,
    command: Sequence[str] = (FAIRLEAD,),
    fresh: bool = False,
) -> Running:
    """Starts `fairlead` with these words.

    Args:
        words: Behind the command.
        cwd: Where it runs.
        environ: Further variables.
        command: What is started in place of `fairlead`; in processes of its own, as `fresh` is.
        fresh: As a user starts it, with its imports; without, it is forked (`integration_tests.forked`), and the ranks
            that it starts are fresh.
    """
    marker = uuid.uuid4().hex
    # What a launcher around the tests says of its own ranks is not about the command.
    kept = {k: v for k, v in os.environ.items() if k not in {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"}}
    variables = {**kept, **(environ or {}), MARKER: marker}
    forked = not fresh and tuple(command) == (FAIRLEAD,) and start_variables(variables) == start_variables(os.environ)
    files = cwd / f".{marker}.out", cwd / f".{marker}.err"
    process: subprocess.Popen[str] | ForkedProcess
    with files[0].open("w") as out, files[1].open("w") as err:
        if forked:
            process = fork([*command, *words], variables, cwd, out, err)
        else:
            process = subprocess.Popen(
                [*command, *words],
                cwd=cwd,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                process_group=0,
                # A shell that starts things in the background has SIGINT ignored, and children inherit that.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
    return Running(process, marker, cwd, files)


def fairlead(
    *words: str,
    cwd: Path,
    environ: Mapping[str, str] | None = None,
    command: Sequence[str] = (FAIRLEAD,),
    fresh: bool = False,
) -> Call:
    """Runs `fairlead` to its end; the arguments are those of `start`."""
    return start(*words, cwd=cwd, environ=environ, command=command, fresh=fresh).end()


def marked(marker: str) -> list[int]:
    """The processes that were started, by whatever way, from the command with this marker."""
    wanted = f"{MARKER}={marker}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # A process that has ended and waits for its parent has an empty environment.
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # it ended while we looked
    return found


def _shown(pid: int) -> str:
    """What a process does: its state, CPU seconds, threads, where it waits in the kernel, and its command."""
    entry = Path("/proc") / str(pid)
    try:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
        command = (entry / "cmdline").read_text().replace("\0", " ")
        waits = (entry / "wchan").read_text()
    except OSError as error:
        return f"{pid}: {error}"
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return f"{pid}: {fields[0]}, {seconds:.1f} s, {fields[17]} threads, in {waits}: {command}"


def gone(marker: str) -> None:
    """Waits until no process of the command is left."""
    deadline = time.monotonic() + 20
    while left := marked(marker):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def events(run: Path) -> list[dict[str, Any]]:
    """The history of a run."""
    path = run / "history.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def names(run: Path) -> list[str]:
    """The names of the events of a run."""
    return [event["event"] for event in events(run)]


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its content, folders with None; what tests write for themselves is left out."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if not path.name.startswith(".") and "__pycache__" not in path.parts
    }


def dedent(text: str) -> str:
    """Text without its common indentation and first newline."""
    return textwrap.dedent(text).lstrip("\n")

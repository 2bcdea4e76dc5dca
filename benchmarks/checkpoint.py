"""Saving and loading a large state: how long the loop is blocked, until it is durable, and what it costs the steps.

The limits are measured in the same turns: copying the bytes within memory, and writing them with `write` and `fsync`.
The peers are `torch.save` with an fsync, Lightning's CheckpointIO and AsyncCheckpointIO, and torch's distributed
checkpoints, of which only ours and the first are on the disk when they say so. After each side all that it left to the
kernel is written, so that the next one does not pay for it. `--gib 0.1` and `--gib 4` take other sizes.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._stats import options, paired_ratio, report
from fairlead_checkpoint_io import TorchCheckpointIOConfig
from fairlead_checkpoint_io.async_file_runtime import AsyncFileCheckpointIO
from fairlead_checkpoint_io.files.writing import write_state
from fairlead_checkpoint_io.torch_file_runtime import TorchFileCheckpointIO
from fairlead_runs.commit import FileHash, checkpoint_name, publish, stage

TENSOR_MIB = 16
STEPS_S = 1.0
"""How long steps are measured without a save."""

State = dict[str, Any]


def make_state(gib: float) -> State:
    """Weights of as many MiB as asked for, in tensors of a size that layers have, and what else a checkpoint holds."""
    count = max(2, round(gib * 1024 / TENSOR_MIB))
    weights = {f"layers.{i}.weight": torch.randn(TENSOR_MIB << 18) for i in range(count)}
    return {"state_dict": weights, "epoch": 1, "global_step": 10}


class Sides:
    """What is measured; each side leaves the folder as it found it."""

    def __init__(self, folder: Path, state: State) -> None:
        self.folder, self.state = folder, state
        self.tensors: list[torch.Tensor] = list(state["state_dict"].values())
        # Copied into again and again: as warm as one of the whole size, which would leave too little memory at 4 GiB.
        self.warm = [tensor.clone() for tensor in self.tensors[: 1024 // TENSOR_MIB]]
        self.found: dict[str, list[float]] = defaultdict(list)
        self.peaks: dict[str, float] = {}
        self.ours = TorchFileCheckpointIO(TorchCheckpointIOConfig())
        self.ours_async = AsyncFileCheckpointIO(TorchFileCheckpointIO(TorchCheckpointIOConfig()))
        self.file = folder / "to-load.ckpt"
        write_state(state, self.file)
        self.number = 0

    def target(self, name: str) -> Path:
        """A path that nobody has used."""
        self.number += 1
        return self.folder / f"{name}-{self.number}"

    def turn(self, names: list[str]) -> None:
        """Each side once."""
        for name in names:
            self._even()
            before = _memory_gib("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
            getattr(self, name)()
            self.peaks[name] = max(self.peaks.get(name, 0.0), _memory_gib("VmHWM") - before)
            self.tidy()

    def tidy(self) -> None:
        """Deletes what was saved, and has all of it on the disk that the kernel still holds."""
        for left in self.folder.iterdir():
            if left != self.file:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        os.sync()

    def _even(self) -> None:
        """The same beginning for each side: the file to load is in the kernel's cache, no freed memory is at hand."""
        with self.file.open("rb") as file:
            while file.read(1 << 24):
                pass
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def note(self, name: str, began: float) -> None:
        """Seconds since then."""
        self.found[name].append(time.perf_counter() - began)

    # -- the limits

    def memcpy(self) -> None:
        began = time.perf_counter()
        for number, source in enumerate(self.tensors):
            self.warm[number % len(self.warm)].copy_(source)
        self.note("memcpy", began)

    def raw_write(self) -> None:
        began = time.perf_counter()
        fd = os.open(self.target("raw"), os.O_WRONLY | os.O_CREAT)
        for tensor in self.tensors:
            array: Any = tensor.numpy()
            view = memoryview(array).cast("B")
            while view.nbytes:
                view = view[os.write(fd, view) :]
        os.fsync(fd)
        os.close(fd)
        self.note("write and fsync", began)

    # -- saves that return when they are done

    def torch_save(self) -> None:
        began = time.perf_counter()
        with open(self.target("torch"), "wb") as file:
            torch.save(self.state, file)
            file.flush()
            os.fsync(file.fileno())
        self.note("torch.save and fsync", began)

    def lightning_save(self) -> None:
        began = time.perf_counter()
        TorchCheckpointIO().save_checkpoint(self.state, self.target("lightning"))
        self.note("Lightning", began)

    def dcp_save(self) -> None:
        began = time.perf_counter()
        dcp.save(self.state["state_dict"], checkpoint_id=self.target("dcp"))
        self.note("torch DCP", began)

    def our_save(self) -> None:
        root = self.target("ours")
        root.mkdir()
        began = time.perf_counter()
        staged = stage(root, checkpoint_name(10), token="b")
        self.ours.submit(self.state, staged / "state.ckpt", lambda digest: _publish(staged, digest))
        self.note("Fairlead torch", began)

    # -- saves that go on behind the loop: blocked, then durable

    def lightning_async(self) -> None:
        io = AsyncCheckpointIO(TorchCheckpointIO())
        began = time.perf_counter()
        io.save_checkpoint(self.state, self.target("lightning-async"))
        self.note("Lightning async, blocked", began)
        io.teardown()
        self.note("Lightning async, ended", began)

    def dcp_async(self) -> None:
        began = time.perf_counter()
        future = dcp.async_save(self.state["state_dict"], checkpoint_id=self.target("dcp-async"))
        self.note("torch DCP async, blocked", began)
        future.result()  # type: ignore[union-attr]
        self.note("torch DCP async, ended", began)

    def our_async(self) -> None:
        root = self.target("ours-async")
        root.mkdir()  # it is there from the second save on
        self.memcpy()  # right before, or the ratio would be of two moments
        began = time.perf_counter()
        staged = stage(root, checkpoint_name(10), token="b")
        self.ours_async.submit(self.state, staged / "state.ckpt", lambda digest: _publish(staged, digest))
        self.note("Fairlead async, blocked", began)
        self.ours_async.wait()
        self.note("Fairlead async, durable", began)

    # -- loads

    def torch_load(self) -> None:
        self._load("torch_load", "torch.load")

    def our_load(self) -> None:
        self._load("our_load", "Fairlead load")

    def _load(self, side: str, name: str) -> None:
        """In a process of its own, as a start does: what one side makes of the heap would help the next one."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_loads, args=(side, self.file, theirs))
        process.start()
        seconds, self.peaks[side] = ours.recv()
        process.join()
        self.found[name].append(seconds)


SIDES = [
    *("raw_write", "torch_save", "lightning_save", "dcp_save", "our_save"),
    *("lightning_async", "dcp_async", "our_async", "torch_load", "our_load"),
]


def _loads(side: str, file: Path, pipe: Connection) -> None:
    """The process that loads once, and tells the seconds and the memory that it took."""
    backend = TorchFileCheckpointIO(TorchCheckpointIOConfig())
    before = _memory_gib("VmRSS")
    began = time.perf_counter()
    loaded = torch.load(file, weights_only=True) if side == "torch_load" else backend.load_checkpoint(file)
    seconds = time.perf_counter() - began
    pipe.send((seconds, _memory_gib("VmHWM") - before))
    del loaded


def _publish(staged: Path, digest: FileHash | None) -> None:
    publish(staged, {"step": 10, "start": 1}, hashes={"state.ckpt": digest} if digest else {})


# -- what the steps feel


class Steps:
    """A step of pure computation on all cores, and its time while something saves."""

    def __init__(self) -> None:
        self.a = torch.randn(512, 512)

    def times(self, until: Callable[[float], bool]) -> list[float]:
        """Seconds of each step until the condition holds, which is told the seconds since the beginning."""
        taken: list[float] = []
        began = time.perf_counter()
        while not taken or not until(time.perf_counter() - began):
            step = time.perf_counter()
            for _ in range(4):
                self.a = torch.nn.functional.normalize(self.a @ self.a)
            taken.append(time.perf_counter() - step)
        return taken

    def slowdown(self, save: Callable[[], Callable[[], bool]]) -> float:
        """The median step while a save goes on, over the median step without one.

        Args:
            save: Begins the save, and returns what says whether it has ended.
        """
        alone = self.times(lambda seconds: seconds > STEPS_S)
        ended = save()
        meanwhile = self.times(lambda _: ended())
        return statistics.median(meanwhile) / statistics.median(alone)


class Savers:
    """What begins a save in the background, for `Steps`."""

    def __init__(self, sides: Sides) -> None:
        self.sides = sides
        context = multiprocessing.get_context("spawn")
        for tensor in sides.tensors:
            shared: Any = tensor
            shared.share_memory_()  # all of them save the same memory, which another process sees
        self.path = sides.folder / "process"
        self.go, self.done = context.Event(), context.Event()
        self.process = context.Process(target=_writes, args=(sides.state, self.path, self.go, self.done), daemon=True)
        self.process.start()
        if not self.done.wait(120):
            raise RuntimeError("the writing process did not start")

    def ours(self) -> Callable[[], bool]:
        ended = threading.Event()
        staged = stage(self.sides.target("ours"), checkpoint_name(10), token="b")

        def then(digest: FileHash | None) -> None:
            _publish(staged, digest)
            ended.set()

        self.sides.ours_async.submit(self.sides.state, staged / "state.ckpt", then)
        return ended.is_set

    def another_process(self) -> Callable[[], bool]:
        """What ours would be with a process instead of a thread, the copy into shared memory left out."""
        self.done.clear()
        self.go.set()
        return self.done.is_set

    def lightning(self) -> Callable[[], bool]:
        io = AsyncCheckpointIO(TorchCheckpointIO())
        io.save_checkpoint(self.sides.state, self.sides.target("lightning-async"))
        pool: Any = io._executor
        ended = pool.submit(lambda: None)  # behind the save, in the same single thread
        return lambda: bool(ended.done())

    def dcp(self) -> Callable[[], bool]:
        future: Any = dcp.async_save(self.sides.state["state_dict"], checkpoint_id=self.sides.target("dcp-async"))
        return lambda: bool(future.done())


def _writes(state: State, path: Path, go: Event, done: Event) -> None:
    """The writing process, as polite as our thread."""
    os.nice(10)
    done.set()
    while True:
        go.wait()
        go.clear()
        write_state(state, path)
        done.set()


def _memory_gib(field: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 2**20
    raise RuntimeError(f"no {field} in /proc/self/status")


def main() -> None:
    given = options(__doc__, rounds=9, gib=1.0)
    gib = 0.03 if given.quick else given.numbers["gib"]
    warnings.filterwarnings("ignore")  # peers warn about this or that, once a save
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix="fairlead-checkpoint-", dir=Path(__file__).parent) as scratch:
        sides = Sides(Path(scratch), make_state(gib))
        for turn in range(1 + given.rounds):
            sides.turn(SIDES if turn % 2 == 0 else SIDES[::-1])
        taken = {name: values[1:] for name, values in sides.found.items()}
        sides.warm.clear()
        steps, savers = Steps(), Savers(sides)
        slower: dict[str, list[float]] = defaultdict(list)
        for turn in range(1 + given.rounds):
            order = ["ours", "another_process", "lightning", "dcp"]
            for name in order if turn % 2 == 0 else order[::-1]:
                slowdown = steps.slowdown(getattr(savers, name))
                if turn:
                    slower[name].append(slowdown)
                sides.ours_async.wait()
                sides.tidy()
        savers.process.kill()
        sides.ours_async.teardown()
    dist.destroy_process_group()
    one = [1.0] * given.rounds
    ratios = {
        "block_vs_memcpy": paired_ratio(taken["Fairlead async, blocked"], taken["memcpy"], bound=1.3),
        "durable_vs_raw_write": paired_ratio(taken["Fairlead async, durable"], taken["write and fsync"], bound=1.2),
        "save_vs_raw_write": paired_ratio(taken["Fairlead torch"], taken["write and fsync"], bound=1.2),
        "load_vs_torch_load": paired_ratio(taken["Fairlead load"], taken["torch.load"], bound=1.0),
        "block_vs_lightning_async": paired_ratio(taken["Fairlead async, blocked"], taken["Lightning async, blocked"]),
        "block_vs_dcp_async": paired_ratio(taken["Fairlead async, blocked"], taken["torch DCP async, blocked"]),
        "step_slowdown_while_saving": paired_ratio(slower["ours"], one),
        "step_slowdown_of_a_process": paired_ratio(slower["another_process"], one),
        "step_slowdown_of_lightning": paired_ratio(slower["lightning"], one),
        "step_slowdown_of_dcp": paired_ratio(slower["dcp"], one),
    }
    peaks = {name: round(value, 2) for name, value in sides.peaks.items()}
    report("checkpoint", ratios, taken, given, gib=gib, peak_memory_gib=peaks)


if __name__ == "__main__":
    main()

"""`checkpoint_io: async`: the loop goes on, and still nothing is lost or mixed up."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import subprocess
import sys
import threading
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlead.errors import CheckpointError
from fairlead.interfaces import BuildContext
from fairlead.plugins import PluginManager
from fairlead_checkpoint_io import AsyncCheckpointIOConfig, TorchCheckpointIOConfig
from fairlead_checkpoint_io import async_file_runtime as runtime
from fairlead_checkpoint_io.async_file_runtime import AsyncFileCheckpointIO
from fairlead_checkpoint_io.torch_file_runtime import TorchFileCheckpointIO
from fairlead_runs.checkpoint_io import DurableSaves
from fairlead_runs.commit import FileHash


class Gated(TorchFileCheckpointIO):
    """The real backend; each save waits until the test lets it write, and may be told to fail."""

    def __init__(self) -> None:
        super().__init__(TorchCheckpointIOConfig())
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.fails: set[str] = set()
        self.addresses: list[int] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.begun.set()
        assert self.gate.wait(60)
        if Path(path).name in self.fails:
            raise OSError(28, "No space left on device")
        if isinstance(checkpoint.get("w"), torch.Tensor):
            self.addresses.append(checkpoint["w"].data_ptr())
        super().save_checkpoint(checkpoint, path, storage_options)


@pytest.fixture
def inner() -> Gated:
    return Gated()


@pytest.fixture
def backend(inner: Gated) -> Iterator[AsyncFileCheckpointIO]:
    backend = AsyncFileCheckpointIO(inner)
    yield backend
    inner.gate.set()
    backend.teardown()


class Thing:
    """An object of a user's, with something mutable in it."""

    def __init__(self) -> None:
        self.values = [1]
        self.tensor = torch.ones(2)


def everything() -> dict[str, Any]:
    base = torch.arange(12.0).reshape(3, 4)
    model = torch.nn.BatchNorm1d(4)
    return {
        "w": base,
        "view": base[1],
        "transposed": base.t(),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "grad": torch.ones(2, requires_grad=True) * 2,
        "half": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(5),
        "sparse": torch.eye(3).to_sparse(),
        "complex": torch.ones(2, dtype=torch.complex64).conj(),
        "model": model.state_dict(),
        "nested": {"list": [1, [2, torch.zeros(1)]], "tuple": (1, [torch.zeros(1)]), "set": {1}},
        "ordered": OrderedDict(a=[1]),
        "bytes": bytearray(b"ab"),
        "thing": Thing(),
        "namespace": Namespace(a=[1]),
        "size": torch.Size([2]),
    }


def mutate(value: Any, seen: set[int]) -> None:
    """Changes all that can be changed, in place."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.zero_() if value.layout is not torch.strided else value.fill_(-77)
    elif isinstance(value, dict):
        for item in list(value.values()):
            mutate(item, seen)
        vars(value).clear() if hasattr(value, "__dict__") else None
        value.clear()
        value["leaked"] = True
    elif isinstance(value, (list, tuple)):
        for item in value:
            mutate(item, seen)
        if isinstance(value, list):
            value.append("leaked")
    elif isinstance(value, set):
        value.add("leaked")
    elif isinstance(value, bytearray):
        value[0] = 0
    elif hasattr(value, "__dict__"):
        mutate(vars(value), seen)


def test_nothing_that_changes_after_the_save_gets_into_the_file(
    backend: AsyncFileCheckpointIO, inner: Gated, tmp_path: Path
) -> None:
    """The file holds the state at the call, byte for byte what a synchronous save writes."""
    state = everything()
    TorchFileCheckpointIO(TorchCheckpointIOConfig()).save_checkpoint(copy.copy(state), tmp_path / "sync.ckpt")
    backend.save_checkpoint(state, tmp_path / "async.ckpt")
    assert not (tmp_path / "async.ckpt").exists()  # it returned before the file was written
    mutate(state, set())
    assert state == {"leaked": True}
    inner.gate.set()
    backend.wait()
    assert (tmp_path / "async.ckpt").read_bytes() == (tmp_path / "sync.ckpt").read_bytes()


def test_plain_torch_reads_it_and_shared_storages_stay_shared(
    backend: AsyncFileCheckpointIO, inner: Gated, tmp_path: Path
) -> None:
    inner.gate.set()
    base = torch.arange(4.0)
    backend.save_checkpoint({"a": base, "b": base[1:], "c": base}, tmp_path / "x.ckpt")
    backend.wait()
    loaded = torch.load(tmp_path / "x.ckpt", weights_only=True)
    loaded["a"][1] = 9
    assert loaded["b"].tolist() == [9, 2, 3]
    assert loaded["a"] is loaded["c"]


def held_bytes(backend: AsyncFileCheckpointIO) -> int:
    """Host memory held for the next save."""
    free = [arena._free for arena in backend._background._idle]
    return sum(size * len(buffers) for kinds in free for (size, _), buffers in kinds.items())


def test_buffers_are_reused_and_those_without_use_are_freed(inner: Gated, tmp_path: Path) -> None:
    inner.gate.set()
    backend = AsyncFileCheckpointIO(inner)
    for step in range(3):
        backend.save_checkpoint({"w": torch.full((1000,), float(step))}, tmp_path / f"{step}.ckpt")
        backend.wait()
    assert len(set(inner.addresses)) == 1
    assert [backend.load_checkpoint(tmp_path / f"{n}.ckpt")["w"][0].item() for n in range(3)] == [0, 1, 2]
    assert held_bytes(backend) == 4000
    backend.save_checkpoint({"w": torch.zeros(10)}, tmp_path / "small.ckpt")
    backend.wait()
    assert held_bytes(backend) == 40
    backend.teardown()
    assert held_bytes(backend) == 0


def test_the_save_after_the_bound_waits_and_says_so(
    backend: AsyncFileCheckpointIO, inner: Gated, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend.save_checkpoint({"n": 1}, tmp_path / "1.ckpt")
    assert inner.begun.wait(60)
    waiting, accepted = threading.Event(), threading.Event()

    class Notice(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert "1.ckpt is still being written" in record.getMessage()
            waiting.set()

    def save_second() -> None:
        backend.save_checkpoint({"n": 2}, tmp_path / "2.ckpt")
        accepted.set()

    notice = Notice()
    logging.getLogger("fairlead.checkpoint_io").addHandler(notice)
    try:
        second = threading.Thread(target=save_second)
        second.start()
        assert waiting.wait(60)
        assert not accepted.is_set()
        inner.gate.set()
        assert accepted.wait(60)
        second.join()
    finally:
        logging.getLogger("fairlead.checkpoint_io").removeHandler(notice)
    backend.wait()
    assert sorted(os.listdir(tmp_path)) == ["1.ckpt", "2.ckpt"]


def test_two_in_flight_do_not_share_buffers(inner: Gated, tmp_path: Path) -> None:
    backend = AsyncFileCheckpointIO(inner, max_in_flight=2)
    weight = torch.zeros(100)
    backend.save_checkpoint({"w": weight}, tmp_path / "0.ckpt")
    backend.save_checkpoint({"w": weight.fill_(1)}, tmp_path / "1.ckpt")
    weight.fill_(2)
    inner.gate.set()
    backend.teardown()
    assert [backend.load_checkpoint(tmp_path / f"{n}.ckpt")["w"][0].item() for n in (0, 1)] == [0, 1]


def test_a_failure_is_raised_once_at_the_next_save_which_is_kept(
    backend: AsyncFileCheckpointIO, inner: Gated, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors surface at the next save."""
    inner.gate.set()
    inner.fails = {"1.ckpt"}
    backend.save_checkpoint({"n": 1}, tmp_path / "1.ckpt")
    with pytest.raises(CheckpointError, match="a checkpoint was not written in the background") as caught:
        # One slot: this save is accepted only when the first has ended.
        backend.save_checkpoint({"n": 2}, tmp_path / "2.ckpt")
    assert caught.value.where == str(tmp_path / "1.ckpt")
    assert "No space left" in str(caught.value.why)
    backend.wait()
    assert backend.load_checkpoint(tmp_path / "2.ckpt") == {"n": 2}
    backend.teardown()
    assert [r.levelname for r in caplog.records if "1.ckpt was not written" in r.message] == ["ERROR"]


def test_a_failure_is_raised_once_at_the_end(inner: Gated, tmp_path: Path) -> None:
    """Errors surface at exit."""
    inner.gate.set()
    inner.fails = {"1.ckpt", "2.ckpt"}
    backend = AsyncFileCheckpointIO(inner, max_in_flight=2)
    inner.gate.clear()
    backend.save_checkpoint({"n": 1}, tmp_path / "1.ckpt")
    backend.save_checkpoint({"n": 2}, tmp_path / "2.ckpt")
    inner.gate.set()
    with pytest.raises(CheckpointError, match="2 checkpoints were not written") as caught:
        backend.teardown()
    assert caught.value.where == f"{tmp_path}/1.ckpt\n{tmp_path}/2.ckpt"
    backend.teardown()
    backend.save_checkpoint({"n": 3}, tmp_path / "3.ckpt")  # a second fit() with the same backend
    backend.teardown()
    assert backend.load_checkpoint(tmp_path / "3.ckpt") == {"n": 3}


def test_what_cannot_be_copied_fails_in_the_save_itself(backend: AsyncFileCheckpointIO, tmp_path: Path) -> None:
    for _ in range(2):  # the slot is given back
        with pytest.raises(CheckpointError, match=r"_thread\.lock .* cannot be copied"):
            backend.save_checkpoint({"l": threading.Lock()}, tmp_path / "x.ckpt")


def test_then_runs_when_the_file_is_durable_and_not_after_a_failure(
    backend: AsyncFileCheckpointIO, inner: Gated, tmp_path: Path
) -> None:
    inner.fails = {"bad.ckpt"}
    seen: list[tuple[str, bool]] = []
    assert isinstance(backend, DurableSaves)

    def publish(digest: FileHash | None) -> None:
        seen.append((threading.current_thread().name, (tmp_path / "good.ckpt").exists()))

    backend.submit({"n": 1}, tmp_path / "good.ckpt", publish)
    assert seen == []
    inner.gate.set()
    backend.wait()
    assert seen == [("fairlead-checkpoint_0", True)]
    backend.submit({"n": 1}, tmp_path / "bad.ckpt", publish)
    with pytest.raises(CheckpointError):
        backend.wait()
    assert len(seen) == 1


def test_an_error_of_then_is_a_failure_of_its_save(
    backend: AsyncFileCheckpointIO, inner: Gated, tmp_path: Path
) -> None:
    inner.gate.set()

    def publish(digest: FileHash | None) -> None:
        raise CheckpointError("the manifest was not written", fix="free some space")

    backend.submit({"n": 1}, tmp_path / "x.ckpt", publish)
    with pytest.raises(CheckpointError, match="in the background") as caught:
        backend.wait()
    assert caught.value.why == "the manifest was not written"
    assert caught.value.fix == "free some space"


def test_then_that_waits_for_itself_is_an_error_and_no_deadlock(
    backend: AsyncFileCheckpointIO, inner: Gated, tmp_path: Path
) -> None:
    inner.gate.set()
    backend.submit({"n": 1}, tmp_path / "x.ckpt", lambda _: backend.wait())
    with pytest.raises(CheckpointError, match="in the background") as caught:
        backend.wait()
    assert "must not call" in str(caught.value.why)


def test_the_last_good_checkpoint_outlives_a_failed_save(
    backend: AsyncFileCheckpointIO, inner: Gated, tmp_path: Path
) -> None:
    """Pain 10: Lightning's ModelCheckpoint deletes the old one right after the save call of the new one."""
    inner.fails = {"2.ckpt"}
    inner.gate.set()
    backend.save_checkpoint({"n": 1}, tmp_path / "1.ckpt")
    backend.wait()
    inner.gate.clear()
    backend.save_checkpoint({"n": 2}, tmp_path / "2.ckpt")
    backend.remove_checkpoint(tmp_path / "1.ckpt")
    assert (tmp_path / "1.ckpt").exists()
    inner.gate.set()
    with pytest.raises(CheckpointError):
        backend.wait()
    assert os.listdir(tmp_path) == ["1.ckpt"]
    backend.save_checkpoint({"n": 3}, tmp_path / "3.ckpt")
    backend.remove_checkpoint(tmp_path / "1.ckpt")
    backend.wait()
    assert os.listdir(tmp_path) == ["3.ckpt"]


def test_loading_sees_what_was_saved_before(backend: AsyncFileCheckpointIO, inner: Gated, tmp_path: Path) -> None:
    inner.gate.set()
    backend.save_checkpoint({"n": 1}, tmp_path / "x.ckpt")
    assert backend.load_checkpoint(tmp_path / "x.ckpt") == {"n": 1}


def test_a_save_is_finished_when_the_program_just_ends(tmp_path: Path) -> None:
    code = f"""
import torch
from fairlead_checkpoint_io import TorchCheckpointIOConfig
from fairlead_checkpoint_io.async_file_runtime import AsyncFileCheckpointIO
from fairlead_checkpoint_io.torch_file_runtime import TorchFileCheckpointIO
backend = AsyncFileCheckpointIO(TorchFileCheckpointIO(TorchCheckpointIOConfig()))
backend.save_checkpoint({{"w": torch.ones(1 << 20)}}, {str(tmp_path / "x.ckpt")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["w"].sum() == 1 << 20


def test_it_goes_to_another_process_and_works_in_a_fork(tmp_path: Path) -> None:
    """`ddp_spawn` pickles it, `ddp_fork` copies it without its thread."""
    backend = AsyncFileCheckpointIO(TorchFileCheckpointIO(TorchCheckpointIOConfig()))
    backend.save_checkpoint({"n": 1}, tmp_path / "1.ckpt")
    backend.wait()
    other = pickle.loads(pickle.dumps(backend))
    other.save_checkpoint({"n": 2}, tmp_path / "2.ckpt")
    other.teardown()
    child = os.fork()
    if child == 0:
        try:
            backend.save_checkpoint({"n": 3}, tmp_path / "3.ckpt")
            backend.teardown()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    backend.teardown()
    assert sorted(os.listdir(tmp_path)) == ["1.ckpt", "2.ckpt", "3.ckpt"]


def test_it_is_built_around_what_the_config_says(tmp_path: Path) -> None:
    config = AsyncCheckpointIOConfig(max_in_flight=3, inner=TorchCheckpointIOConfig(verify=False))
    context = BuildContext(resolution=None, environ={}, plugins=PluginManager())  # type: ignore[arg-type]
    backend = runtime.build(config, context)
    assert isinstance(backend._inner, TorchFileCheckpointIO)
    assert backend._inner._config.verify is False
    backend.save_checkpoint({"n": 1}, tmp_path / "x.ckpt")
    backend.teardown()
    assert backend.load_checkpoint(tmp_path / "x.ckpt") == {"n": 1}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_the_steps_go_before_the_thread_that_writes(
    backend: AsyncFileCheckpointIO, inner: Gated, tmp_path: Path
) -> None:
    """Where all cores compute, a save behind the loop would otherwise take half of them."""
    inner.gate.set()
    niceness: list[int] = []
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    backend.submit(
        {"n": 1},
        tmp_path / "x.ckpt",
        lambda digest: niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())),
    )
    backend.wait()
    assert niceness == [min(19, before + 10)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_tensors_are_copied_before_the_save_returns(
    backend: AsyncFileCheckpointIO, inner: Gated, tmp_path: Path
) -> None:
    weight = torch.ones(1 << 24, device="cuda")
    backend.save_checkpoint({"w": weight}, tmp_path / "x.ckpt")
    weight.fill_(2)
    inner.gate.set()
    backend.wait()
    loaded = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert loaded["w"].device.type == "cpu"
    assert loaded["w"].sum() == 1 << 24

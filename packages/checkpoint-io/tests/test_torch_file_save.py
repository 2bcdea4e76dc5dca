"""What `checkpoint_io: torch` writes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tracemalloc
from argparse import Namespace
from collections import OrderedDict, defaultdict
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlead.errors import CheckpointError, ConfigError
from fairlead_checkpoint_io import TorchCheckpointIOConfig
from fairlead_checkpoint_io.files import writing
from fairlead_checkpoint_io.torch_file_runtime import TorchFileCheckpointIO
from fairlead_runs.checkpoint_io import DurableSaves
from fairlead_runs.commit import FileHash, Syscalls, hash_file


@pytest.fixture
def backend() -> TorchFileCheckpointIO:
    return TorchFileCheckpointIO(TorchCheckpointIOConfig())


def trained() -> dict[str, Any]:
    """A state as Lightning makes it: model, optimizer, numbers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 1}


def test_plain_torch_reads_it(backend: TorchFileCheckpointIO, tmp_path: Path) -> None:
    """The standard backend; nothing of ours is needed to read its files."""
    state, path = trained(), tmp_path / "a b" / "ü" / "last.ckpt"
    backend.save_checkpoint(state, path)
    loaded = torch.load(path, weights_only=True)
    assert loaded["global_step"] == 1
    assert loaded["state_dict"]._metadata == state["state_dict"]._metadata
    for name, tensor in state["state_dict"].items():
        assert torch.equal(tensor, loaded["state_dict"][name])
    assert list(path.parent.iterdir()) == [path]


def test_equal_states_give_equal_bytes_whatever_the_file_is_called(
    backend: TorchFileCheckpointIO, tmp_path: Path
) -> None:
    backend.save_checkpoint(trained(), tmp_path / "one.ckpt")
    backend.save_checkpoint(trained(), tmp_path / "another-name.ckpt")
    assert (tmp_path / "one.ckpt").read_bytes() == (tmp_path / "another-name.ckpt").read_bytes()


def test_equal_strings_and_tuples_need_not_be_one_object(backend: TorchFileCheckpointIO, tmp_path: Path) -> None:
    """They are after a resume and were not before, or the other way round; torch.save then differs."""
    name, betas = "layer.weight", (0.9, 0.99)
    shared = {"names": [name, name], "betas": [betas, betas]}
    apart = {"names": [name, "".join(["layer", ".weight"])], "betas": [betas, (*betas,)]}
    plain_shared, plain_apart = BytesIO(), BytesIO()
    torch.save(shared, plain_shared)
    torch.save(apart, plain_apart)
    assert plain_shared.getvalue() != plain_apart.getvalue()
    backend.save_checkpoint(shared, tmp_path / "one.ckpt")
    backend.save_checkpoint(apart, tmp_path / "two.ckpt")
    assert (tmp_path / "one.ckpt").read_bytes() == (tmp_path / "two.ckpt").read_bytes()


def test_a_loaded_state_is_saved_as_the_bytes_it_came_from(backend: TorchFileCheckpointIO, tmp_path: Path) -> None:
    state = trained()
    backend.save_checkpoint(state, tmp_path / "one.ckpt")
    loaded = backend.load_checkpoint(tmp_path / "one.ckpt")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    model.load_state_dict(loaded["state_dict"])
    optimizer.load_state_dict(loaded["optimizer_states"][0])
    again = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 1}
    backend.save_checkpoint(again, tmp_path / "two.ckpt")
    assert (tmp_path / "one.ckpt").read_bytes() == (tmp_path / "two.ckpt").read_bytes()


def test_shared_storages_and_containers_stay_shared(backend: TorchFileCheckpointIO, tmp_path: Path) -> None:
    weight, ring = torch.arange(6.0), [1, 2]
    ring.append(ring)  # type: ignore[arg-type]
    backend.save_checkpoint({"a": weight, "b": weight[2:4], "l": ring, "m": ring}, tmp_path / "s.ckpt")
    loaded = backend.load_checkpoint(tmp_path / "s.ckpt")
    loaded["a"][2] = 99
    assert loaded["b"].tolist() == [99, 3]
    assert loaded["l"] is loaded["m"] is loaded["l"][2]


def test_containers_keep_their_kind(backend: TorchFileCheckpointIO, tmp_path: Path) -> None:
    state: dict[Any, Any] = {"o": OrderedDict(z=1, a=(1, "x")), "s": {1, 2}, "n": None, "b": b"ab", 3: 1.5, "t": ()}
    backend.save_checkpoint(state, tmp_path / "s.ckpt")
    loaded = backend.load_checkpoint(tmp_path / "s.ckpt")
    assert loaded == state
    assert type(loaded["o"]) is OrderedDict
    counts = defaultdict(int, a=1)
    backend.save_checkpoint({"d": counts}, tmp_path / "d.ckpt")
    assert backend.load_checkpoint(tmp_path / "d.ckpt", weights_only=False)["d"]["missing"] == 0


def test_large_tensors_are_not_copied_in_python(backend: TorchFileCheckpointIO, tmp_path: Path) -> None:
    state = {"weight": torch.zeros(16 << 20, dtype=torch.uint8)}
    backend.save_checkpoint(state, tmp_path / "warm.ckpt")
    tracemalloc.start()
    backend.save_checkpoint(state, tmp_path / "big.ckpt")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


class _FullDisk(Syscalls):
    """A disk with room for some bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, fd: int, data: memoryview) -> int:
        if data.nbytes > self.room:
            raise OSError(28, "No space left on device")
        self.room -= data.nbytes
        return super().write(fd, data)


@pytest.mark.parametrize("room", [0, 1000, 5 << 20])
def test_a_full_disk_is_named_and_the_old_file_stays(room: int, tmp_path: Path) -> None:
    """Pain 4: torch hides the reason behind `unexpected pos`; the user reads the disk's own."""
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"the previous one")
    state = {"a": torch.zeros(1 << 20), "b": torch.ones(1 << 20)}
    with pytest.raises(CheckpointError) as caught:
        writing.write_state(state, path, syscalls=_FullDisk(room))
    assert caught.value.where == str(path)
    assert caught.value.why == "No space left on device"
    assert "free some space" in str(caught.value.fix)
    assert path.read_bytes() == b"the previous one"
    assert list(tmp_path.iterdir()) == [path]


def test_the_kernels_own_limit_is_reported(tmp_path: Path) -> None:
    """The same with a real limit on the size of files, in a process of its own."""
    code = f"""
import resource, torch
from pathlib import Path
from fairlead.errors import CheckpointError
from fairlead_checkpoint_io.files.writing import write_state
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    write_state({{"a": torch.zeros(1 << 20)}}, Path({str(tmp_path)!r}, "x.ckpt"))
except CheckpointError as error:
    print(error.why)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "File too large"
    assert list(tmp_path.iterdir()) == []


def test_a_kill_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    code = f"""
import os, signal, torch
from pathlib import Path
from fairlead_runs.commit import Syscalls
from fairlead_checkpoint_io.files.writing import write_state
class Dies(Syscalls):
    count = 0
    def write(self, fd, data):
        self.count += 1
        if self.count == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(fd, data)
write_state({{"step": 1}}, Path({str(path)!r}))
write_state({{"step": 2, "a": torch.zeros(1 << 20), "b": torch.zeros(1 << 20)}}, Path({str(path)!r}), syscalls=Dies())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == -9, done.stderr
    assert torch.load(path, weights_only=True) == {"step": 1}


def test_what_cannot_be_pickled_is_an_answer(backend: TorchFileCheckpointIO, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be pickled") as caught:
        backend.save_checkpoint({"f": lambda: 0}, tmp_path / "x.ckpt")
    assert "lambda" in str(caught.value.why)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_the_way_of_the_directory(backend: TorchFileCheckpointIO, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot make the directory") as caught:
        backend.save_checkpoint({}, tmp_path / "file" / "x.ckpt")
    assert "a file is in the way" in str(caught.value.fix)


def test_objects_that_a_resume_will_refuse_are_said_when_saving(
    backend: TorchFileCheckpointIO, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pain 15: the requeued job is too late to learn that its checkpoint needs weights_only=False."""
    with caplog.at_level(logging.WARNING):
        backend.save_checkpoint({"h": Namespace(a=1)}, tmp_path / "x.ckpt")
        backend.save_checkpoint({"h": Namespace(a=1)}, tmp_path / "y.ckpt")
    assert [("argparse.Namespace" in record.message) for record in caplog.records] == [True]


def test_urls_and_options_are_refused(backend: TorchFileCheckpointIO, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="local paths only"):
        backend.save_checkpoint({}, "s3://bucket/x.ckpt")
    with pytest.raises(ConfigError, match="storage_options"):
        backend.save_checkpoint({}, tmp_path / "x", storage_options={"a": 1})
    backend.save_checkpoint({"a": 1}, f"file://{tmp_path}/y.ckpt")
    assert backend.load_checkpoint(str(tmp_path / "y.ckpt")) == {"a": 1}


def test_then_follows_the_durable_file(backend: TorchFileCheckpointIO, tmp_path: Path) -> None:
    seen: list[tuple[list[str], FileHash | None]] = []
    assert isinstance(backend, DurableSaves)
    backend.submit({"a": 1}, tmp_path / "x.ckpt", lambda digest: seen.append((os.listdir(tmp_path), digest)))
    assert seen == [(["x.ckpt"], hash_file(tmp_path / "x.ckpt"))]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        backend.submit({"a": 1}, tmp_path / "file" / "x.ckpt", lambda digest: seen.append(([], digest)))
    assert len(seen) == 1
    backend.wait()


def test_removing(backend: TorchFileCheckpointIO, tmp_path: Path) -> None:
    backend.save_checkpoint({}, tmp_path / "x.ckpt")
    backend.remove_checkpoint(tmp_path / "x.ckpt")
    backend.remove_checkpoint(tmp_path / "x.ckpt")
    backend.save_checkpoint({}, tmp_path / "dir" / "state.ckpt")
    backend.remove_checkpoint(str(tmp_path / "dir"))
    assert list(tmp_path.iterdir()) == []

"""Reading a directory of shards: of torch's own making, damaged, and of somebody who means harm."""

from __future__ import annotations

import builtins
import os
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from fairlead.errors import CheckpointError
from fairlead_checkpoint_io import DistributedCheckpointIOConfig, TorchCheckpointIOConfig
from fairlead_checkpoint_io.distributed_shards.runtime import DistributedCheckpointIO
from fairlead_checkpoint_io.files.shards import read_contents
from fairlead_checkpoint_io.torch_file_runtime import TorchFileCheckpointIO
from fairlead_runs.commit import Manifest, hash_file


class Harm:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def io(**fields: Any) -> DistributedCheckpointIO:
    return DistributedCheckpointIO(DistributedCheckpointIOConfig(**fields))


def checkpoint() -> dict[str, Any]:
    group = {"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}
    state = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.full((4, 2), 0.1)}}, "param_groups": [group]}
    return {
        "state_dict": {"w": torch.arange(8.0).reshape(4, 2), "half": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer_states": [state],
        "loops": {"epoch": 1},
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    io().save_checkpoint(checkpoint(), tmp_path / "state.ckpt")
    return tmp_path / "state.ckpt"


def rewritten(path: Path, change: Any) -> None:
    """The table of contents, as somebody else would leave it."""
    table = pickle.loads((path / ".metadata").read_bytes())
    change(table)
    (path / ".metadata").write_bytes(pickle.dumps(table))


def test_torch_and_we_read_the_same_table(saved: Path) -> None:
    """What torch writes is let in: all dtypes, paths, nested places."""
    assert read_contents(saved) == pickle.loads((saved / ".metadata").read_bytes())
    kinds = (
        "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
    )
    dtypes = [getattr(torch, kind) for kind in [*kinds.split(), "float8_e4m3fn", "float8_e5m2"]]
    state = {"a": [1, {"b": torch.ones(2)}], **{str(dtype): torch.empty(2, dtype=dtype) for dtype in dtypes}}
    writer, planner = FileSystemWriter(saved.parent / "torchs"), torch.distributed.checkpoint.DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    writer.set_up_storage_writer(True)
    plans, table = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    results = writer.write_data(planner.finish_plan(writer.prepare_global_plan(plans)[0]), planner).value()
    writer.finish(table, [results])
    theirs = FileSystemReader(saved.parent / "torchs").read_metadata()
    ours = read_contents(saved.parent / "torchs")
    assert len(ours.state_dict_metadata) > 15
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data


def test_a_file_backend_reads_it_too(saved: Path) -> None:
    for backend in (io(), TorchFileCheckpointIO(TorchCheckpointIOConfig())):
        found = backend.load_checkpoint(saved)
        assert torch.equal(found["state_dict"]["w"], checkpoint()["state_dict"]["w"])
        assert found["optimizer_states"][0]["param_groups"] == checkpoint()["optimizer_states"][0]["param_groups"]


def test_equal_states_give_equal_bytes(saved: Path, tmp_path: Path) -> None:
    io().save_checkpoint(checkpoint(), tmp_path / "other" / "place.ckpt")
    for name in os.listdir(saved):
        assert (saved / name).read_bytes() == (tmp_path / "other" / "place.ckpt" / name).read_bytes()


@pytest.mark.parametrize("committed", [True, False])
def test_a_flipped_bit_is_found_or_at_least_an_error_of_ours(saved: Path, committed: bool) -> None:
    """With a manifest each is found; without one, as torch writes, nothing else than our error is raised."""
    if committed:
        files = {f"state.ckpt/{file.name}": hash_file(file) for file in saved.iterdir()}
        (saved.parent / "manifest.json").write_bytes(Manifest.now(files, {"step": 1}).dump())
    for file in sorted(saved.iterdir()):
        data = bytearray(file.read_bytes())
        for position in range(0, len(data), 3 if file.name == ".metadata" else 13):
            # Without checksums other bits may make a pickle that asks for all of the memory.
            bit = position % 8 if committed else 7
            data[position] ^= 1 << bit
            file.write_bytes(data)
            data[position] ^= 1 << bit
            try:
                found = io().load_checkpoint(saved)
            except CheckpointError:
                continue
            assert not committed, (file.name, position, found)
        file.write_bytes(data)


@pytest.mark.parametrize("where", ["table", "planner", "reduce-getattr", "bytes", "rest"])
def test_nothing_in_it_is_run(saved: Path, tmp_path: Path, where: str) -> None:
    """Each of these runs a command when torch's own reader, or Lightning's, loads it."""
    harm = Harm(f"touch {tmp_path / 'harmed'}")
    if where == "table":
        (saved / ".metadata").write_bytes(pickle.dumps(harm))
    elif where == "planner":
        rewritten(saved, lambda table: table.planner_data.update(w=harm))
    elif where == "reduce-getattr":
        (saved / ".metadata").write_bytes(pickle.dumps(_Getattr()))
    elif where == "rest":
        torch.save({"loops": harm}, saved / "meta.pt")
    else:
        io().save_checkpoint({**checkpoint(), "optimizer_states": [_with(harm)]}, saved)
    with pytest.raises(CheckpointError) as raised:
        io().load_checkpoint(saved)
    assert not (tmp_path / "harmed").exists()
    assert str(saved) in str(raised.value)
    assert "pickled objects" in raised.value.what or "code to be run" in raised.value.what


class _Getattr:
    def __reduce__(self) -> tuple[Any, ...]:
        return builtins.getattr, (Metadata, "__init__")


def _with(harm: Harm) -> dict[str, Any]:
    return {"state": {0: {"step": harm}}, "param_groups": [{"params": [0]}]}


def test_objects_are_loaded_when_they_are_asked_for_by_name(tmp_path: Path) -> None:
    state = {"state": {0: {"thing": Namespace(a=1)}}, "param_groups": [{"params": [0]}]}
    io().save_checkpoint({"state_dict": {}, "optimizer_states": [state]}, tmp_path / "x")
    with pytest.raises(CheckpointError, match="pickled objects"):
        io().load_checkpoint(tmp_path / "x")
    named = io(safe_globals=("argparse.Namespace",)).load_checkpoint(tmp_path / "x")
    trusted = io().load_checkpoint(tmp_path / "x", weights_only=False)
    for found in (named, trusted):
        assert found["optimizer_states"][0]["state"][0]["thing"] == Namespace(a=1)


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd"])
def test_it_does_not_lead_out_of_its_directory(saved: Path, name: str) -> None:
    def lead_out(table: Metadata) -> None:
        assert table.storage_data is not None
        for info in table.storage_data.values():
            info.relative_path = name

    rewritten(saved, lead_out)
    with pytest.raises(CheckpointError, match="outside of its folder"):
        io().load_checkpoint(saved)


@pytest.mark.parametrize("name", [".metadata", "meta.pt", "__0_0.distcp"])
@pytest.mark.parametrize("how", ["gone", "empty", "cut", "flipped"])
def test_damage_is_named(saved: Path, name: str, how: str) -> None:
    """Also without a manifest beside it, as long as it can be seen at all."""
    file = saved / name
    data = file.read_bytes()
    if how == "gone":
        file.unlink()
    elif how == "flipped":
        file.write_bytes(b"\0" * 64 + data[64:])
    else:
        file.write_bytes(data[: len(data) // 2 if how == "cut" else 0])
    with pytest.raises(CheckpointError) as raised:
        io().load_checkpoint(saved)
    assert str(saved) in str(raised.value)


def test_a_flipped_bit_in_a_weight_is_found_by_the_manifest(saved: Path) -> None:
    hashes = {f"state.ckpt/{name}": hash_file(saved / name) for name in os.listdir(saved)}
    (saved.parent / "manifest.json").write_bytes(Manifest.now(hashes, {}).dump())
    io().load_checkpoint(saved)
    file = saved / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(torch.arange(8.0).numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp does not match its checksum"):
        io().load_checkpoint(saved)
    assert not torch.equal(io(verify=False).load_checkpoint(saved)["state_dict"]["w"], checkpoint()["state_dict"]["w"])


def test_a_save_that_fails_leaves_the_one_before(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 0: .*Can't pickle"):
        io().save_checkpoint({**checkpoint(), "loops": lambda: None}, saved)
    assert os.listdir(saved.parent) == ["state.ckpt"]
    assert io().load_checkpoint(saved)["loops"] == {"epoch": 1}
    io().save_checkpoint({**checkpoint(), "loops": 2}, saved)
    assert io().load_checkpoint(saved)["loops"] == 2
    assert os.listdir(saved.parent) == ["state.ckpt"]

"""What `checkpoint_io: torch` says of files that are not what they should be."""

from __future__ import annotations

import pickle
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fairlead.errors import CheckpointError, ConfigError
from fairlead_checkpoint_io import TorchCheckpointIOConfig
from fairlead_checkpoint_io.torch_file_runtime import TorchFileCheckpointIO
from fairlead_runs.commit import publish, stage

STATE = {"weight": torch.arange(1000.0), "step": 3}


@pytest.fixture
def backend() -> TorchFileCheckpointIO:
    return TorchFileCheckpointIO(TorchCheckpointIOConfig())


@pytest.fixture
def good(backend: TorchFileCheckpointIO, tmp_path: Path) -> Path:
    path = tmp_path / "good.ckpt"
    backend.save_checkpoint(STATE, path)
    return path


def flip(path: Path, needle: bytes, after: int) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(needle) + after] ^= 1
    path.write_bytes(data)


def test_missing_file_lists_what_is_there(backend: TorchFileCheckpointIO, good: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint") as caught:
        backend.load_checkpoint(good.with_name("god.ckpt"))
    assert "good.ckpt" in str(caught.value.why)
    assert caught.value.fix == f"did you mean {str(good)!r}?"
    with pytest.raises(CheckpointError) as caught:
        backend.load_checkpoint(good.parent / "nowhere" / "at all.ckpt")
    assert str(good.parent) in str(caught.value.why)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.write_bytes(b""), "empty"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "cut off"),
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), "cut off"),
        (lambda path: flip(path, torch.arange(1000.0).numpy().tobytes(), 400), "data/0 does not match"),
        (lambda path: flip(path, b"weight", 2), "data.pkl does not match"),
    ],
)
def test_damage_is_found(
    damage: Callable[[Path], object], why: str, backend: TorchFileCheckpointIO, good: Path
) -> None:
    """torch.load itself returns flipped tensors without a word."""
    damage(good)
    with pytest.raises(CheckpointError, match="damaged") as caught:
        backend.load_checkpoint(good)
    assert why in str(caught.value.why)
    assert caught.value.where == str(good)


def test_verification_can_be_switched_off(good: Path) -> None:
    flip(good, torch.arange(1000.0).numpy().tobytes(), 400)
    loaded = TorchFileCheckpointIO(TorchCheckpointIOConfig(verify=False)).load_checkpoint(good)
    assert not torch.equal(loaded["weight"], STATE["weight"])  # type: ignore[arg-type]


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "x")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.write_text("trainer: {}\n"), "does not begin"),
        (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "does not begin"),
        (_zip, "not one of torch.save"),
        (lambda path: torch.save([1, 2], path), "holds a list"),
    ],
)
def test_other_files_are_no_checkpoints(
    make: Callable[[Path], object], why: str, backend: TorchFileCheckpointIO, tmp_path: Path
) -> None:
    path = tmp_path / "x.ckpt"
    make(path)
    with pytest.raises(CheckpointError, match="not a checkpoint") as caught:
        backend.load_checkpoint(path)
    assert why in str(caught.value.why)


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("new_format", [True, False])
def test_pickled_objects_are_refused_and_nothing_is_run(
    new_format: bool, backend: TorchFileCheckpointIO, tmp_path: Path
) -> None:
    """Loading never unpickles arbitrary objects unless asked by name."""
    path, marker = tmp_path / "x.ckpt", tmp_path / "exploded"
    torch.save({"b": Bomb(marker)}, path, _use_new_zipfile_serialization=new_format)
    with pytest.raises(CheckpointError, match="pickled objects") as caught:
        backend.load_checkpoint(path)
    assert not marker.exists()
    assert "weights_only=False" in str(caught.value.fix)


def test_objects_are_allowed_by_name(backend: TorchFileCheckpointIO, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({"h": Namespace(a=1)}, path)
    with pytest.raises(CheckpointError) as caught:
        backend.load_checkpoint(path)
    assert "safe_globals: [argparse.Namespace]" in str(caught.value.fix)
    named = TorchFileCheckpointIO(TorchCheckpointIOConfig(safe_globals=("argparse.Namespace",)))
    assert named.load_checkpoint(path)["h"].a == 1
    assert backend.load_checkpoint(path, weights_only=False)["h"].a == 1
    with pytest.raises(CheckpointError):  # the permission ended with that load
        backend.load_checkpoint(path)
    with pytest.raises(ConfigError, match=r"argparse\.Nonsense"):
        TorchFileCheckpointIO(TorchCheckpointIOConfig(safe_globals=("argparse.Nonsense",))).load_checkpoint(path)


def test_old_files_of_torch_are_read(backend: TorchFileCheckpointIO, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert torch.equal(backend.load_checkpoint(tmp_path / "old.ckpt")["weight"], STATE["weight"])  # type: ignore[arg-type]


def test_a_committed_directory_stands_for_its_state(backend: TorchFileCheckpointIO, tmp_path: Path) -> None:
    staged = stage(tmp_path / "checkpoints", "step-00000003", token="s1")
    backend.save_checkpoint(STATE, staged / "state.ckpt")
    published = publish(staged, {"step": 3})
    assert backend.load_checkpoint(published.path)["step"] == 3
    with pytest.raises(CheckpointError, match="a directory, not a checkpoint") as caught:
        backend.load_checkpoint(tmp_path / "checkpoints")
    assert "latest, step-00000003" in str(caught.value.why)


def test_deepspeeds_folder_is_called_by_its_name(backend: TorchFileCheckpointIO, tmp_path: Path) -> None:
    folder = tmp_path / "state.ckpt"
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "latest").write_text("checkpoint")
    (folder / "checkpoint" / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="a folder of DeepSpeed's") as caught:
        backend.load_checkpoint(folder)
    assert "checkpoint consolidate" in str(caught.value.fix)


def test_map_location_is_passed_on(backend: TorchFileCheckpointIO, good: Path) -> None:
    assert backend.load_checkpoint(good, map_location="meta")["weight"].device.type == "meta"

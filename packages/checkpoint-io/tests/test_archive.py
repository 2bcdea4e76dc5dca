"""Reading a file of torch.save in several threads: the same state as torch's, and every damage is found."""

from __future__ import annotations

import os
import random
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlead.errors import CheckpointError
from fairlead_checkpoint_io.files.archive_reader import _PIECE, ArchiveReader
from fairlead_checkpoint_io.files.reading import read_state
from fairlead_checkpoint_io.files.writing import write_state

MIB = 1 << 18  # float32 elements


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records below, at and above the size of a piece, and one that is empty."""
    path = tmp_path_factory.mktemp("archive") / "state.ckpt"
    sizes = [3, 0, _PIECE // 4 - 1, _PIECE // 4, _PIECE // 4 + 1, 5 * MIB, 8 * MIB, 9 * MIB + 7]
    torch.save({f"w{number}": torch.randn(size) for number, size in enumerate(sizes)} | {"step": 3}, path)
    return path


def unpickled(archive: Any) -> Any:
    return torch.load(archive, weights_only=True)


def load(path: Path, *, verify: bool = True) -> tuple[dict[str, object], str | None]:
    with ArchiveReader(path, verify=verify) as archive:
        return unpickled(archive), archive.damaged_record()


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 4]))


def data_of(path: Path, info: zipfile.ZipInfo) -> int:
    """Where a record's bytes begin."""
    with path.open("rb") as file:
        file.seek(info.header_offset + 26)
        return info.header_offset + 30 + sum(int.from_bytes(file.read(2), "little") for _ in range(2))


def test_the_state_is_that_of_torch_bit_for_bit(saved: Path) -> None:
    loaded, damaged = load(saved)
    expected = torch.load(saved, weights_only=True)
    assert damaged is None
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        got = loaded[name]
        assert torch.equal(got, value) if isinstance(got, torch.Tensor) else got == value


def test_a_flipped_bit_anywhere_in_a_record_is_found(saved: Path, tmp_path: Path) -> None:
    """In the first and last byte of each record, and at random places, where the pieces meet among them."""
    chance = random.Random(5)
    path = tmp_path / "damaged.ckpt"
    path.write_bytes(saved.read_bytes())
    with zipfile.ZipFile(saved) as archive:
        records = [info for info in archive.infolist() if info.file_size > 100]
    assert len(records) == 7
    for info in records:
        begin, size = data_of(saved, info), info.file_size
        if info.filename.endswith("data.pkl"):
            places = {size // 2}
        else:
            places = {0, size - 1, chance.randrange(size)} | {size % _PIECE, _PIECE} & set(range(size))
        for place in places:
            flip(path, begin + place)
            with ArchiveReader(path) as opened:
                try:
                    unpickled(opened)
                except Exception:  # a damaged pickle raises anything
                    assert info.filename.endswith("data.pkl")
                assert opened.damaged_record() == info.filename
            flip(path, begin + place)
    assert load(path)[1] is None


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_no_flipped_bit_changes_the_state_or_raises_anything_else(tmp_path: Path) -> None:
    """One bit of each byte, those of headers and of the table of contents among them."""
    good, damaged = tmp_path / "good.ckpt", tmp_path / "damaged.ckpt"
    write_state({"w": torch.arange(40.0), "b": torch.ones(3), "n": {"a": [1, 2.5, "x"]}}, good)
    data = bytearray(good.read_bytes())
    found = 0
    for position in range(len(data)):
        for bit in (position % 8, 3):  # 3: a stored record that calls itself compressed
            data[position] ^= 1 << bit
            damaged.write_bytes(data)
            data[position] ^= 1 << bit
            try:
                state = read_state(damaged)
            except CheckpointError:
                found += 1
            else:  # of padding, or of what nobody reads
                assert torch.equal(state["w"], torch.arange(40.0)), position
                assert torch.equal(state["b"], torch.ones(3)), position
                assert state["n"] == {"a": [1, 2.5, "x"]}, position
    assert found > len(data) / 2


def test_damage_goes_unnoticed_where_nobody_asked(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.ckpt"
    path.write_bytes(saved.read_bytes())
    flip(path, path.stat().st_size // 2)
    assert load(path)[1] is not None
    assert load(path, verify=False)[1] is None


def test_records_that_nobody_read_are_compared_at_the_end(saved: Path, tmp_path: Path) -> None:
    with ArchiveReader(saved) as archive:
        assert archive.damaged_record() is None  # all of them: nothing was loaded
    with zipfile.ZipFile(saved) as read:
        identity = next(info for info in read.infolist() if info.filename.endswith("serialization_id"))
    path = tmp_path / "identity.ckpt"
    path.write_bytes(saved.read_bytes())
    flip(path, data_of(saved, identity))
    assert str(load(path)[1]).endswith("serialization_id")


def test_nothing_writes_into_a_buffer_whose_reading_has_failed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece meets a bad sector while others are being read: torch frees the memory when it hears of that."""
    real = os.preadv
    ended: list[int] = []
    others = threading.Event()

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if buffers[0].nbytes != _PIECE:
            return real(fd, buffers, offset)
        if not ended:
            ended.append(-1)
            assert others.wait(60)
            raise OSError(5, "Input/output error")
        others.set()
        time.sleep(0.2)
        ended.append(offset)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    archive = ArchiveReader(saved)
    info = max(archive._zip.infolist(), key=lambda item: item.file_size)
    archive._data[data_of(saved, info)] = info
    archive.seek(data_of(saved, info))
    with pytest.raises(OSError, match="Input/output error"):
        archive.readinto(bytearray(info.file_size))
    at_the_error = len(ended)
    archive.close()
    assert len(ended) == at_the_error > 1


def test_a_file_that_gets_shorter_while_it_is_read_is_an_error_and_no_hang(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.ckpt"
    path.write_bytes(saved.read_bytes())
    with ArchiveReader(path) as archive:
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(RuntimeError):
            unpickled(archive)

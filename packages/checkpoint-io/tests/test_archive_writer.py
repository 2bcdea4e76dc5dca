"""Archives whose checksums Fairlead computes: the bytes of `torch.save`, whatever is in them."""

from __future__ import annotations

import errno
import io
import threading
import zipfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import pytest
import torch
import xxhash

from fairlead_checkpoint_io.files.archive_writer import _STRIDE, ArchiveWriter


@pytest.fixture(autouse=True)
def _options() -> Iterator[None]:
    yield
    torch.serialization.set_crc32_options(True)


def by_torch(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def by_us(value: object) -> bytes:
    file = io.BytesIO()
    ArchiveWriter(file).add(value)
    return file.getvalue()


def numbers(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


def like_a_descriptor(rest: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"PK\x07\x08" + rest), dtype=torch.uint8)


STATES: dict[str, Any] = {
    "no tensor": {"step": 3, "name": "ü" * 1000},
    "an empty tensor": {"a": torch.zeros(0), "b": torch.zeros(2, 0), "c": torch.ones(1)},
    "around a stride": [numbers(_STRIDE + more) for more in (-1, 0, 1)] + [numbers(3 * _STRIDE + 5)],
    "many records": [torch.full((3,), float(number)) for number in range(1000)],
    "one storage twice": (lambda weight: {"a": weight, "b": weight[3:7], "c": weight.view(3, 4)})(torch.arange(12.0)),
    "a module": torch.nn.Linear(8, 8).state_dict(),
    "what looks like ZIP": [like_a_descriptor(b"\xff" * rest) for rest in (0, 3, 4, 12, 20)]
    + [torch.frombuffer(bytearray(sign + bytes(26)), dtype=torch.uint8) for sign in (b"PK\x03\x04", b"PK\x01\x02")],
}


@pytest.mark.parametrize("name", STATES)
def test_the_bytes_are_those_of_torch(name: str) -> None:
    """Also the identifier that torch derives from the checksums."""
    ours = by_us(STATES[name])
    assert ours == by_torch(STATES[name])
    with zipfile.ZipFile(io.BytesIO(ours)) as archive:
        assert archive.testzip() is None


def test_several_archives_in_one_file() -> None:
    file = io.BytesIO()
    writer = ArchiveWriter(file)
    for value in STATES.values():
        writer.add(value)
    assert file.getvalue() == b"".join(by_torch(value) for value in STATES.values())


class _Hash:
    """A file of which only the checksum and the length are kept."""

    def __init__(self) -> None:
        self.hash = xxhash.xxh3_128()
        self.length = 0

    def write(self, data: memoryview) -> int:
        self.hash.update(data)
        self.length += memoryview(data).nbytes
        return memoryview(data).nbytes

    def flush(self) -> None:
        pass


@pytest.mark.full
def test_archives_of_more_than_4_gib_are_those_of_torch() -> None:
    """ZIP has other headers for a record that is as large, and for those that lie behind 4 GiB."""
    nothing = torch.from_numpy(np.zeros((1 << 32) + 5, dtype=np.uint8))  # pages that nobody writes take no memory
    state = {"large": nothing, "behind": torch.arange(3.0), "empty": torch.zeros(0)}
    ours, theirs = _Hash(), _Hash()
    ArchiveWriter(ours).add(state)
    torch.save(state, theirs)  # type: ignore[arg-type]  # all that torch asks of a file
    assert ours.length == theirs.length > 1 << 32
    assert ours.hash.hexdigest() == theirs.hash.hexdigest()


def test_the_saves_of_other_threads_keep_their_checksums() -> None:
    """Ours run in the background; what a script saves meanwhile is a sound archive, too."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(io.BytesIO):
        def write(self, data: Any) -> int:
            inside.set()
            assert go_on.wait(60)
            return super().write(data)

    def save() -> None:
        ArchiveWriter(slow).add(STATES["a module"])

    slow = Slow()
    thread = threading.Thread(target=save)
    thread.start()
    assert inside.wait(60)
    meanwhile = by_torch(STATES["many records"])
    go_on.set()
    thread.join()
    with zipfile.ZipFile(io.BytesIO(meanwhile)) as archive:
        assert archive.testzip() is None
    assert slow.getvalue() == by_torch(STATES["a module"])


@pytest.mark.parametrize("wanted", [True, False])
def test_the_scripts_own_choice_stays_its_own(wanted: bool) -> None:
    """Whoever leaves the checksums out of his own files still has them in our checkpoints."""
    expected = by_torch(STATES["a module"])
    torch.serialization.set_crc32_options(wanted)
    assert by_us(STATES["a module"]) == expected
    assert torch.serialization.get_crc32_options() is wanted


def test_another_layout_of_archives_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later torch that writes whole records at once: slower, but sound."""
    expected, save = by_torch(STATES["a module"]), torch.save

    def later(value: object, file: IO[bytes]) -> None:
        whole = io.BytesIO()
        save(value, whole)
        for begin in range(0, len(whole.getvalue()), 100):
            file.write(whole.getvalue()[begin : begin + 100])

    monkeypatch.setattr(torch, "save", later)
    assert by_us(STATES["a module"]) == expected


@pytest.mark.parametrize("after", [0, 100, 5 << 20])
def test_the_error_of_the_file_is_raised(after: int) -> None:
    """And not the one that torch's writer makes of it."""

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            if self.tell() > after:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    with pytest.raises(OSError, match="No space left"):
        ArchiveWriter(Full()).add([torch.ones(1 << 20), torch.ones(1 << 20)])
    assert torch.serialization.get_crc32_options()

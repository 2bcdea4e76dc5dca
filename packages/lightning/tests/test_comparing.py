"""The checksums of a checkpoint, compared by all ranks together: each reads a part, rank 0 has the last word."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fairlead.errors import FairleadError
from fairlead_distributed.objects import broadcast_object
from fairlead_distributed.run.resume_source import check_for, help_to_compare
from fairlead_distributed.testing import run_ranks
from fairlead_runs.commit import checkpoint_name, manifest, publish, stage, write_file
from fairlead_runs.commit.files import FileHash, hash_file

CASES = ("sound", "flipped", "unseen", "short", "unknown")


class Compared(NamedTuple):
    """The files that a rank read, and on rank 0 the damages, an error and warnings."""

    read: list[str]
    damages: list[str]
    error: str
    warned: list[str]


def checkpoint(root: Path) -> Path:
    staged = stage(root, checkpoint_name(7), token="s1")
    sizes = {"state.ckpt": 5000, **{f"rank-{rank}.pt": 1000 + rank for rank in range(5)}}
    hashes = {name: write_file(staged / name, os.urandom(size)) for name, size in sizes.items()}
    return publish(staged, {"step": 7, "start": 1}, hashes=hashes).path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def compare_each(rank: int, folder: Path) -> dict[str, Compared]:
    return {case: compare(rank, folder / case / "step-00000007", case) for case in CASES}


def compare(rank: int, path: Path, case: str) -> Compared:
    read: list[str] = []

    def counted(file: Path, algorithm: str | None = None, **options: object) -> FileHash:
        read.append(file.name)
        if rank == 1 and case == "unseen" and file.name == "rank-2.pt":
            raise FileNotFoundError(2, "No such file or directory")
        if rank == 1 and case == "unknown":
            raise FairleadError("unknown checksum algorithm 'later'")
        return hash_file(file, algorithm)

    vars(manifest)["hash_file"] = counted
    damages: list[str] = []
    problem = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 0:
            try:
                damages = [str(damage) for damage in check_for(deep=True)(path)]
            except FairleadError as error:
                problem = error.what
            broadcast_object("done")
        else:
            heard: Any
            while (heard := broadcast_object(None)) != "done":
                help_to_compare(heard)
    return Compared(sorted(read), damages, problem, [str(warning.message) for warning in caught])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparing")
    paths = {case: checkpoint(folder / case) for case in CASES}
    for name in ("rank-0.pt", "rank-3.pt", "state.ckpt"):
        flip(paths["flipped"] / name)
    (paths["short"] / "rank-1.pt").write_bytes(b"short")
    return folder


@pytest.fixture(scope="module")
def compared(folder: Path) -> list[dict[str, Compared]]:
    return run_ranks(compare_each, 2, folder)


def test_each_file_is_read_by_one_rank(compared: list[dict[str, Compared]]) -> None:
    """For many nodes: none of them waits for another to read all of it."""
    zero, one = (ranks["sound"] for ranks in compared)
    assert zero.read == ["rank-1.pt", "rank-3.pt", "state.ckpt"]
    assert one.read == ["rank-0.pt", "rank-2.pt", "rank-4.pt"]
    assert (zero.damages, zero.warned) == ([], [])


def test_what_any_rank_finds_is_found(compared: list[dict[str, Compared]]) -> None:
    found = compared[0]["flipped"]
    assert len(found.damages) == 3
    for name in ("rank-0.pt", "rank-3.pt", "state.ckpt"):
        assert any(f"{name}: its " in damage for damage in found.damages)
    assert found.warned == []


def test_a_node_that_sees_less_does_not_cost_the_checkpoint(compared: list[dict[str, Compared]]) -> None:
    """Stale or broken, a view of a file system is no damage of the file: rank 0 looks itself, and says so."""
    found = compared[0]["unseen"]
    assert found.damages == []
    assert "rank-2.pt" in found.read
    assert len(found.warned) == 1
    assert (
        "rank 1 reads another content than rank 0, where it is right: step-00000007/rank-2.pt: missing"
        in found.warned[0]
    )


def test_sizes_are_compared_without_the_others_and_a_single_rank_is_alone(
    compared: list[dict[str, Compared]], folder: Path
) -> None:
    found = compared[0]["short"]
    assert (found.read, compared[1]["short"].read) == ([], [])
    assert "5 bytes, should be 1001" in found.damages[0]
    alone = check_for(deep=True)(folder / "flipped" / "step-00000007")
    assert sorted(str(damage.file) for damage in alone) == ["rank-0.pt", "rank-3.pt", "state.ckpt"]


def test_a_checksum_that_a_rank_does_not_know_is_an_error(compared: list[dict[str, Compared]]) -> None:
    assert compared[0]["unknown"].error == "unknown checksum algorithm 'later'"

"""Predictions without Lightning: what a batch gave is taken apart, written, killed, gone on with, and read in order."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import signal
import threading
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SubsetRandomSampler

from fairlead.errors import (
    CheckpointError,
    ConfigError,
    FairleadError,
    FingerprintError,
    RunDirectoryError,
    UserCodeError,
)
from fairlead_distributed import Predictions, RankFailedError
from fairlead_distributed.predictions import folder as folder_module
from fairlead_distributed.predictions.batches import Batches, batches_of, share
from fairlead_distributed.predictions.folder import PredictionFolder
from fairlead_distributed.predictions.records import split
from fairlead_distributed.predictions.shard_file import Batch
from fairlead_distributed.testing import run_ranks
from fairlead_runs.commit import Syscalls

SETTINGS = {"weights": {"layer": "1"}, "job": {"model": {"args": {"width": 4}}}}
Pair = namedtuple("Pair", "low high")


@dataclasses.dataclass
class Boxes:
    scores: Tensor
    names: list[str]


def written(path: Path, loaders: list[list[tuple[list[int], Any]]], shards: int = 2, **settings: Any) -> Predictions:
    """The predictions of these batches, (indices, output), of each loader in so many shards."""
    folder = PredictionFolder(path, path, {**SETTINGS, **settings})
    try:
        for number, batches in enumerate(loaders):
            folder.add_loader(number, {"samples": sum(len(indices) for indices, _ in batches)}, len(batches))
            made = [Batch(n, one, *split(output, len(one))) for n, (one, output) in enumerate(batches)]
            step = max(1, -(-len(made) // shards))
            for begin in range(0, len(made), step):
                folder.write(number, made[begin : begin + step])
        folder.commit()
    finally:
        folder.close()
    return Predictions(path)


def test_every_kind_of_output_comes_back_sample_by_sample(tmp_path: Path) -> None:
    logits = torch.randn(6, 3).to(torch.bfloat16)
    ragged = [torch.arange(n % 3) for n in range(6)]

    def output(at: slice) -> Any:
        count = len(logits[at])
        return {
            "logits": logits[at],
            "pair": Pair(logits[at, 0].double(), np.arange(6)[at]),
            "boxes": Boxes(torch.ones(count, 2, dtype=torch.complex128), [f"é{n}" for n in range(6)][at]),
            "ragged": ragged[at],
            "any": [{"n": n, "t": (torch.tensor(n), None), "b": b"\x00", 3: float("inf")} for n in range(6)][at],
        }

    # Out of order, in batches of unequal size, with a sample twice.
    parts = [([4, 5], output(slice(4, 6))), ([0, 1, 2], output(slice(0, 3))), ([2, 3], output(slice(2, 4)))]
    predictions = written(tmp_path / "out", [parts])
    assert len(predictions) == 6
    assert predictions.loaders[0].indices.tolist() == list(range(6))
    for n, record in enumerate(predictions):
        assert torch.equal(record["logits"], logits[n])
        assert record["logits"].untyped_storage().nbytes() == 6, "a row keeps no other row in memory"
        assert record["pair"] == {"low": logits[n, 0].double(), "high": torch.tensor(n)}
        assert record["boxes"]["names"] == f"é{n}"
        assert record["boxes"]["scores"].dtype is torch.complex128
        assert torch.equal(record["ragged"], ragged[n])
        assert record["any"] == {"n": n, "t": (torch.tensor(n), None), "b": b"\x00", 3: float("inf")}
    assert torch.equal(predictions[-1]["logits"], logits[5])
    assert [one["any"]["n"] for one in predictions[1:4]] == [1, 2, 3]
    with pytest.raises(IndexError, match="no prediction 6: there are 6"):
        predictions[6]
    whole = predictions.to_torch()
    assert torch.equal(whole["logits"], logits)
    assert whole["boxes"]["names"] == [f"é{n}" for n in range(6)]
    assert whole["pair"]["high"].tolist() == list(range(6))
    file = tmp_path / "out" / "loader-0-batch-000000000.safetensors"
    file.write_bytes(file.read_bytes().replace("é5".encode(), "é6".encode()))
    with pytest.raises(CheckpointError, match="damaged"):
        predictions.verify()
    assert pickle.loads(pickle.dumps(predictions))[1]["any"]["n"] == 1, "as for the workers of a loader"
    # The files are of safetensors.
    with safe_open(tmp_path / "out" / "loader-0-batch-000000002.safetensors", "pt") as opened:
        assert torch.equal(opened.get_tensor("data.logits"), logits[2:4])
        assert opened.get_tensor("index.start").tolist() == [2]


def test_records_of_several_structures_and_shapes(tmp_path: Path) -> None:
    outputs = [{"a": torch.zeros(2, 3)}, {"a": torch.ones(2, 5), "b": ["x", "y"]}, torch.arange(2)]
    mixed = written(tmp_path / "mixed", [[([2 * n, 2 * n + 1], one) for n, one in enumerate(outputs)]], shards=1)
    assert mixed[2]["a"].tolist() == [1.0] * 5
    assert (mixed[3]["b"], mixed[5]) == ("y", torch.tensor(1))
    assert len(mixed.to_torch()) == 6
    # A sequence that is padded to the longest of each batch.
    padded = written(tmp_path / "padded", [[([0, 1], torch.zeros(2, 3)), ([2], torch.ones(1, 4))]], shards=1)
    assert [row.tolist() for row in padded.to_torch()] == [[0.0] * 3, [0.0] * 3, [1.0] * 4]


def test_several_loaders_one_of_them_empty(tmp_path: Path) -> None:
    found = written(tmp_path, [[([0, 1], torch.tensor([1, 2]))], [], [([0], torch.tensor([3]))]])
    assert (len(found), [len(one) for one in found.loaders]) == (3, [2, 0, 1])
    assert [int(one) for one in found] == [int(found[n]) for n in range(3)] == [1, 2, 3]
    assert list(written(tmp_path / "none", [[]])) == []


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (None, "returned None: there is nothing to save"),
        (torch.zeros(()), r"a tensor of shape \(\), of a batch of 3"),
        ({"loss": 0.5}, r"returned\['loss'\] is a single float, of a batch of 3 samples"),
        ((torch.zeros(3), torch.zeros(2, 7)), r"returned\[1\] is a tensor of shape \(2, 7\), of a batch of 3"),
        (["a", "b"], "is a list of 2, of a batch of 3"),
        ([lambda: 0] * 3, "cannot be saved"),
        (torch.zeros(3, 3).to_sparse(), "of a special kind"),
        ({(1, 2): torch.zeros(3)}, r"has the key \(1, 2\)"),
    ],
)
def test_what_is_not_of_the_samples_is_refused_with_its_place(output: Any, said: str) -> None:
    with pytest.raises(UserCodeError, match=said) as raised:
        split(output, 3)
    assert raised.value.fix


def test_a_batch_of_one_and_a_sample_that_is_no_batch() -> None:
    assert split("text", 1) == (0, [["text"]])
    assert split(torch.tensor(2.0), 1)[1] == [[torch.tensor(2.0)]]
    (column,) = split(torch.zeros(4, 5), None)[1]
    assert isinstance(column, Tensor)
    assert column.shape == (1, 4, 5)


# -- which batches there are


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("left", [[], [0], [*range(7), 9, *range(12, 17)], range(3, 1003)])
def test_the_ranks_share_the_batches_that_are_left(left: Sequence[int], ranks: int) -> None:
    shares = [share(np.asarray(left, dtype=np.int64), ranks, rank) for rank in range(ranks)]
    assert len({len(own) for own in shares}) == 1, "a rank with a batch less would keep the others waiting"
    assert sorted(number for own in shares for number in own if number is not None) == list(left)
    assert sum(number is None for own in shares for number in own) < ranks


class Backwards(Sampler[int]):
    """A user's own."""

    def __iter__(self) -> Any:
        return iter(range(8, -1, -2))


class Buckets(Sampler[list[int]]):
    """A batch sampler of the user's own, random and with no arguments that Lightning would know."""

    def __iter__(self) -> Any:
        for size in (1, 3, 2):
            yield [random.randrange(9) for _ in range(size)]


class Strings(Sampler[Any]):
    def __iter__(self) -> Any:
        return iter(["a"])


def test_the_batches_of_a_loader() -> None:
    def numbers(**arguments: Any) -> list[list[int]]:
        found = batches_of(DataLoader(range(9), **arguments), 0)  # type: ignore[arg-type]
        return [list(found[number]) for number in range(len(found))]

    whole = [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert (
        numbers(batch_size=4) == numbers(batch_size=4, drop_last=True) == numbers(batch_size=4, shuffle=True) == whole
    )
    assert numbers(batch_size=4, sampler=DistributedSampler(range(9), 2, 1)) == whole  # type: ignore[arg-type]
    assert numbers(batch_size=2, sampler=Backwards()) == [[8, 6], [4, 2], [0]]
    subset = numbers(batch_size=2, sampler=SubsetRandomSampler([5, 1, 3]))
    assert sorted(index for batch in subset for index in batch) == [1, 3, 5]
    assert numbers(batch_size=None) == [[n] for n in range(9)]
    drawn = numbers(batch_sampler=Buckets())
    assert [len(batch) for batch in drawn] == [1, 3, 2]
    assert numbers(batch_sampler=Buckets()) == drawn, "all starts draw the same"
    few = RandomSampler(range(9), num_samples=4)
    assert sorted(map(len, numbers(batch_sampler=BatchSampler(few, 3, drop_last=True)))) == [1, 3]
    with pytest.raises(ConfigError, match="Strings gives 'a', a str, as the index"):
        numbers(sampler=Strings())


def test_a_limit_counts_the_batches_of_all() -> None:
    batches = Batches.even(103, 10)
    assert [len(batches.first(limit)) for limit in (None, 1.0, 0.5, 1, 0, 99)] == [11, 11, 5, 1, 0, 11]
    assert (batches.first(1).samples, batches.first(2).described()) == (
        10,
        {"samples": 20, "batches": 2, "batch_size": 10},
    )


# -- the folder


def predicts(rank: int, path: Path, kill_at: int, said: Path) -> int:
    """Six batches, a shard each: what is left of them; killed at this system call that renames."""
    rename, count = Syscalls.rename, 0

    def counting(self: Syscalls, source: Any, target: Any) -> None:
        nonlocal count
        if "prediction" in str(target) or "loader" in str(target) or "manifest" in str(target):
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
        rename(self, source, target)

    Syscalls.rename = counting  # type: ignore[method-assign]
    folder = PredictionFolder(path, path, SETTINGS)
    numbers = folder.add_loader(0, {"batches": 6}, 6).left(6).tolist()
    for number in numbers:
        with said.open("a") as file:
            file.write(f"{number} ")
        folder.write(0, [Batch(number, [number], *split(torch.tensor([number]), 1))])
    folder.commit()
    folder.close()
    return len(numbers)


@pytest.mark.full
def test_killed_anywhere_it_goes_on_and_never_reads_as_complete_before(tmp_path: Path) -> None:
    """Before each rename: of `prediction.json`, of each shard, of the manifest."""
    path, said = tmp_path / "out", tmp_path / "said"
    for _ in range(8):
        with pytest.raises(RankFailedError):  # one file more each time
            run_ranks(predicts, 1, path, 1, said, init=False)
        with pytest.raises(CheckpointError, match=r"not complete|no predictions"):
            Predictions(path)
        if len(list(path.glob("loader-*"))) == 6:
            break
    with pytest.raises(RankFailedError):
        run_ranks(predicts, 1, path, 0, said, init=False)  # in the commit
    with pytest.raises(CheckpointError, match="not complete") as raised:
        Predictions(path)
    assert "resumes where it stopped" in str(raised.value.fix)
    assert run_ranks(predicts, 1, path, -1, said, init=False) == [0], "everything was there"
    assert [int(one) for one in Predictions(path)] == list(range(6))
    assert not list(path.glob(".tmp-*"))
    # No finished shard was done again: only the one that was being written, and the one that had been gathered.
    assert all(said.read_text().split().count(str(number)) <= 3 for number in range(6))


def test_a_folder_of_something_else_is_refused_with_the_difference(tmp_path: Path) -> None:
    out = tmp_path / "out"
    written(out, [[([0], torch.zeros(1))]])
    before = sorted(os.listdir(out))
    for other, said in (
        ({"weights": {"layer": "2"}}, "weights.layer: 1 -> 2"),
        ({"job": {"model": {"args": {"width": 8}}}}, "job.model.args.width: 4 -> 8"),
    ):
        with pytest.raises(FingerprintError) as raised:
            PredictionFolder(out, tmp_path, {**SETTINGS, **other})
        assert said in str(raised.value.why)
    folder = PredictionFolder(out, tmp_path, SETTINGS)
    assert folder.complete
    for number, described in ((0, {"samples": 7}), (1, {"samples": 1})):
        with pytest.raises(FingerprintError, match="another") as raised:
            folder.add_loader(number, described, None)
        assert f"loader {number}.samples" in str(raised.value.why)
    folder.close()
    assert sorted(os.listdir(out)) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(RunDirectoryError, match="not empty"):
        PredictionFolder(tmp_path / "mine", tmp_path, SETTINGS)
    assert os.listdir(tmp_path / "mine") == ["notes.txt"]


def test_a_shard_is_written_while_the_next_one_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`write` returns before the disk has answered; one is under way at most, and `commit` waits for the last."""
    fsync, answers, waits = Syscalls.fsync, threading.Event(), threading.Event()

    def slow(self: Syscalls, fd: int) -> None:
        waits.set()
        assert answers.wait(30)
        fsync(self, fd)

    folder = PredictionFolder(tmp_path / "out", tmp_path, SETTINGS)
    folder.add_loader(0, {}, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Syscalls, "fsync", slow)
        folder.write(0, [Batch(0, [0], *split(torch.zeros(1), 1))])
        assert waits.wait(30)
        assert not list((tmp_path / "out").glob("loader-*"))
        threading.Timer(0.1, answers.set).start()
        folder.write(0, [Batch(1, range(1, 2), *split(torch.ones(1), 1))])
        assert len(list((tmp_path / "out").glob("loader-*"))) >= 1, "the first is durable before the second begins"
        folder.commit()
    folder.close()
    assert [float(one) for one in Predictions(tmp_path / "out")] == [0.0, 1.0]


def test_a_full_disk_leaves_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    folder = PredictionFolder(out, tmp_path, SETTINGS)
    folder.add_loader(0, {}, 2)
    folder.write(0, [Batch(0, [0], *split(torch.zeros(1), 1))])
    folder.settle()

    def full(self: Syscalls, fd: int) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(Syscalls, "fsync", full)
        folder.write(0, [Batch(1, [1], *split(torch.zeros(1), 1))])
        with pytest.raises(RunDirectoryError, match="cannot write predictions") as raised:
            folder.settle()
    assert "free some space and start again" in str(raised.value.fix)
    with pytest.raises(FairleadError, match="1 of 2 batches of loader 0 are missing"):
        folder.commit()
    folder.close()
    again = PredictionFolder(out, tmp_path, SETTINGS)
    assert (again.shards, again.add_loader(0, {}, 2).left(2).tolist()) == (1, [1])
    again.close()
    with (out / "loader-0-batch-000000000.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="damaged") as damaged:
        PredictionFolder(out, tmp_path, SETTINGS)
    assert "delete this file" in str(damaged.value.fix)
    assert not (out / ".lock").exists()
    assert json.loads((out / "prediction.json").read_text())["settings"]["weights"] == SETTINGS["weights"]


def blind(rank: int, root: Path) -> str:
    """Rank 1 has a disk of its own."""
    if rank:
        folder_module.LOCK = "elsewhere"  # type: ignore[misc]
    try:
        PredictionFolder(root / "out", root, SETTINGS)
    except RunDirectoryError as error:
        return error.what
    return ""


def test_a_folder_that_a_rank_does_not_see_is_refused(tmp_path: Path) -> None:
    assert run_ranks(blind, 2, tmp_path) == ["rank 1 cannot see the folder for the predictions"] * 2

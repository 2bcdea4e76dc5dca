"""A sampler that knows how much of the data was trained on, and continues there, also with another world size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from operator import index
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from fairlead.errors import CheckpointError, ConfigError
from fairlead_distributed._sampling import as_dataset, derive_seed, permutation, shard_and_rank, size_of

T = TypeVar("T")
_NAME = "ResumableDistributedSampler"
_KEYS = {"seed": int, "epoch": int, "consumed": int, "length": int, "shuffle": bool}


class ResumableDistributedSampler(DistributedSampler[int]):
    """Each rank's part of every epoch's order, with a position that can be saved.

    An epoch has one order, a permutation made of (seed, epoch), the same for any number of ranks. Rank r of W takes
    the samples r, r + W, r + 2 W, ... of what is left of it. So W ranks with batches of B take the next W * B samples
    of the order in each step, and a run that continues with another world size takes exactly what is left, in order.

    **The position counts samples that were trained on**, over all ranks. Drawing does not move it, since the workers of
    a loader draw ahead. The loop moves it: it takes its batches from `batches(loader)`, or calls `advance()` after each
    step (and `end_epoch()` where it leaves an epoch early), or sets `consumed`. When an epoch is consumed, the position
    becomes (epoch + 1, 0) by itself; `set_epoch` need not be called. `iter()` starts at the position of its call.

    When the samples do not divide by the ranks, the ranks that have one less repeat samples from the start of the
    epoch's order, as torch's sampler does; with `drop_last` the ranks that have one more leave it out. It is torch's
    `DistributedSampler`, which Lightning and Fabric leave in place, takes torch's arguments, and is there under torch's
    name too. A loop that takes its batches from the loader itself calls `set_epoch(epoch)`, as with torch's.

    Args:
        dataset_or_length: What is sampled from, or its number of samples.
        num_replicas: The number of ranks; None asks the process group (1 without one).
        rank: This process's rank; None asks the process group (0 without one).
        shuffle: False keeps the dataset's order in every epoch.
        seed: The same on all ranks.
        drop_last: Leave out samples rather than repeat some, where they do not divide by the ranks.

    Raises:
        ConfigError: There is no such rank, or the dataset has no length.
        NotInitializedError: The launcher started several processes, and this one has not joined them yet.

    Example:
        >>> sampler = ResumableDistributedSampler(6, num_replicas=2, rank=0, shuffle=False)
        >>> list(sampler)
        [0, 2, 4]
        >>> sampler.advance(4)  # both ranks trained on two samples
        >>> list(sampler), sampler.state_dict()["consumed"]
        ([4], 4)
    """

    def __init__(
        self,
        dataset_or_length: Sized | Dataset[Any] | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        num_replicas, rank = shard_and_rank(num_replicas, rank, _NAME)
        self.length = size_of(dataset_or_length, _NAME)
        super().__init__(as_dataset(dataset_or_length), num_replicas, rank, shuffle, index(seed), drop_last)
        self._consumed = 0

    def __iter__(self) -> Iterator[int]:
        return iter(self._rest())

    def __len__(self) -> int:
        """This rank's samples in a full epoch, wherever the position is: Lightning counts up to it by its progress."""
        return self.num_samples

    def remaining(self) -> int:
        """This rank's samples from the position to the end of the epoch, with the padding; equal on all ranks."""
        return self._share(self.length - self._consumed)

    @property
    def consumed(self) -> int:
        """The samples of this epoch that all ranks together have trained on; set to all of them, it ends the epoch."""
        return self._consumed

    @consumed.setter
    def consumed(self, samples: int) -> None:
        if not 0 <= samples < self.length + self.num_replicas:
            raise ConfigError(
                f"{samples} consumed samples in an epoch of {self.length}",
                where=f"{_NAME}.consumed",
                why="it counts the samples of the current epoch, over all ranks",
            )
        self._consumed = samples
        if samples and not self.remaining():
            self.end_epoch()

    def advance(self, samples: int) -> None:
        """Says that all ranks together have trained on so many more samples. No collective: each rank says the same.

        Args:
            samples: Batch size times ranks; for an epoch's last batch, its own size times ranks.

        Raises:
            ConfigError: The epoch has not so many left: the caller counts something else.
        """
        left = self.remaining() * self.num_replicas
        if not 0 <= samples <= left:
            raise ConfigError(
                f"cannot advance by {samples} samples",
                where=f"{_NAME}.advance(), epoch {self.epoch}",
                why=f"{self._consumed} of {self.length} are consumed, {left} are left over all ranks",
                fix="count every trained batch once, over all ranks; call end_epoch() to leave an epoch early",
            )
        self.consumed = self._consumed + samples

    def end_epoch(self) -> None:
        """Goes to the start of the next epoch, whatever is left of this one (`limit_train_batches`, early breaks)."""
        self.epoch, self._consumed = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch, for loops that call it anyway; in that epoch already, it does nothing."""
        if epoch != self.epoch:
            self.epoch, self._consumed = epoch, 0

    def batches(self, loader: DataLoader[T]) -> Iterator[T]:
        """The loader's batches to the end of the epoch; each counts as trained on when it is handed out.

        So a checkpoint belongs behind the optimizer's step. After the last batch the state is the next epoch's start. A
        loader that draws from another sampler, or makes its batches in another way, is a ConfigError.

        Example:
            >>> sampler = ResumableDistributedSampler(5, shuffle=False)
            >>> loader = DataLoader(range(5), batch_size=2, sampler=sampler)
            >>> [(batch.tolist(), sampler.epoch, sampler.consumed) for batch in sampler.batches(loader)]
            [([0, 1], 0, 2), ([2, 3], 0, 4), ([4], 1, 0)]
        """
        size = loader.batch_size
        if loader.sampler is not self or size is None:
            raise ConfigError(
                "this loader's batches cannot be counted",
                where=f"{_NAME}.batches()",
                why="it has a custom batch sampler" if size is None else "it draws from another sampler",
                fix="pass DataLoader(dataset, batch_size=..., sampler=this sampler), or call advance() after each step",
            )
        full, rest = divmod(self.remaining(), size)
        left = full + bool(rest and not loader.drop_last)
        if not left:
            self.end_epoch()
            return
        for batch in loader:
            left -= 1
            if left:
                self.advance(size * self.num_replicas)
            else:
                self.end_epoch()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on all ranks: `seed`, `epoch`, `consumed`; `length` and `shuffle` to check it."""
        return {name: getattr(self, name) for name in _KEYS}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to a position that was saved with any world size. The seed becomes that of the state.

        Call it before `iter(loader)`: its workers begin to draw there.

        Raises:
            CheckpointError: It is no such state, or it lies within an epoch of a dataset of another length or order.
                Nothing was changed.
        """
        if (
            not isinstance(state_dict, Mapping)
            or any(type(state_dict.get(name)) is not kind for name, kind in _KEYS.items())
            or not (state_dict["epoch"] >= 0 and 0 <= state_dict["consumed"] <= state_dict["length"])
        ):
            raise CheckpointError(f"this is not a state of a {_NAME}", why=f"expected {sorted(_KEYS)}: {state_dict!r}")
        consumed = state_dict["consumed"]
        for name, what in (("length", "the number of samples"), ("shuffle", "shuffle")):
            before, now = state_dict[name], getattr(self, name)
            if consumed and before != now:
                raise CheckpointError(
                    f"cannot continue within epoch {state_dict['epoch']}: {what} was {before}, now {now}",
                    where=f"{_NAME}.load_state_dict",
                    why=f"the {consumed} consumed samples are the first of an order that no longer exists",
                    fix="resume with the same data, or from a checkpoint at the end of an epoch",
                )
        self.seed, self.epoch, self._consumed = state_dict["seed"], state_dict["epoch"], 0
        self.consumed = consumed  # may end the epoch: with `drop_last`, more ranks may have nothing left to share

    def _share(self, samples: int) -> int:
        samples = max(0, samples)
        return samples // self.num_replicas if self.drop_last else -(-samples // self.num_replicas)

    def _rest(self) -> list[int]:
        share = self.remaining()
        if not share:
            return []
        start = self._consumed + self.rank
        indices = torch.arange(start, start + share * self.num_replicas, self.num_replicas) % self.length
        if self.shuffle:
            indices = permutation(self.length, derive_seed("order", self.seed, self.epoch))[indices]
        return indices.tolist()

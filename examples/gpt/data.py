"""Text that every machine has: the source files of Python's own standard library, as bytes."""

from __future__ import annotations

import os
import random
import sysconfig
from pathlib import Path

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

__all__ = ["StdlibBytes", "Windows", "split_files", "stdlib_files"]

# Installed packages are not the standard library; distributions differ in the tests that they ship; the last two
# are tables (code pages, help topics) rather than code.
SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})


def stdlib_files(root: Path | None = None) -> list[Path]:
    """The `*.py` files of the standard library, ordered by their path below its root."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]  # not walked: site-packages can be huge
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    return [root / path for path in sorted(found)]


def split_files(files: list[Path], seed: int, share: float = 0.05) -> tuple[list[Path], list[Path]]:
    """Training and validation files; whole files, so that no text is in both. The same seed gives the same split."""
    shuffled = random.Random(seed).sample(files, len(files))
    held_out = max(1, round(share * len(files)))
    return shuffled[held_out:], shuffled[:held_out]


class Windows(Dataset[Tensor]):
    """Adjacent windows of a text: item `i` depends on nothing but `i`, which is what an exact resume needs.

    An item is `context + 1` bytes (int64): the inputs and, shifted by one, the targets. `order` shows the windows in
    another order, or only some of them.
    """

    def __init__(self, text: Tensor, context: int, order: Tensor | None = None) -> None:
        self.text = text
        self.context = context
        self.order = torch.arange(self.count(text, context)) if order is None else order

    @staticmethod
    def count(text: Tensor, context: int) -> int:
        """How many windows a text holds."""
        return max(0, (len(text) - 1) // context)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Tensor:
        start = int(self.order[index]) * self.context
        return self.text[start : start + self.context + 1].long()


class StdlibBytes(L.LightningDataModule):
    """Windows of the standard library's source. No download, no cache on disk: 10 MB, read when a stage starts.

    Args:
        context: bytes per window.
        batch_size: windows per batch and rank.
        num_workers: loader processes. The text is in memory, so 0 is fastest.
        seed: chooses the validation files.
        train_samples: use only so many training windows; None is all of them, once an epoch.

    Example:
        >>> data = StdlibBytes(context=64, batch_size=8)
        >>> data.setup()
        >>> next(iter(data.train_dataloader())).shape
        torch.Size([8, 65])
    """

    def __init__(
        self,
        context: int = 128,
        batch_size: int = 16,
        num_workers: int = 0,
        seed: int = 0,
        train_samples: int | None = None,
    ) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.train_samples = train_samples
        self.train_windows: Windows | None = None
        self.val_windows: Windows | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read the text, once."""
        if self.train_windows is not None:
            return
        train, val = (_read(files) for files in split_files(stdlib_files(), self.seed))
        # Both in one fixed random order, so that a part (`train_samples`, `limit_val_batches`) is a fair sample of all.
        self.train_windows = Windows(train, self.context, self._order(train)[: self.train_samples])
        self.val_windows = Windows(val, self.context, self._order(val))

    def _order(self, text: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(Windows.count(text, self.context), generator=generator)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """All training windows once, shuffled; batches are (batch_size, context + 1) of int64."""
        return self._loader(self.train_windows, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """All validation windows, always in the same order."""
        return self._loader(self.val_windows, shuffle=False)

    def _loader(self, windows: Windows | None, shuffle: bool) -> DataLoader[Tensor]:
        if windows is None:
            raise RuntimeError("call setup() before asking for a loader")
        return DataLoader(
            windows,
            self.batch_size,
            shuffle=shuffle,
            drop_last=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


def _read(files: list[Path]) -> Tensor:
    """All files in one uint8 tensor."""
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)

"""`Predictions`: what a prediction has written, as one sequence in the order of the dataset."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, overload

from fairlead.errors import CheckpointError
from fairlead_distributed.predictions.loader_predictions import LoaderPredictions, place_of
from fairlead_distributed.predictions.parquet import write_parquet
from fairlead_distributed.predictions.shard_file import ShardFile
from fairlead_runs.commit import Manifest, read_manifest, verify


class Predictions(Sequence[Any]):
    """The predictions in a folder, in the order of the dataset, each sample once, read when they are asked for.

    What `predict_step` returned for a batch is taken apart: a tensor gives its row, a list its item, and a dict, tuple
    or dataclass of these one with the row or item of each. An object of a class that this process does not know comes
    as a `types.SimpleNamespace`. With several loaders, the samples of the first come first; `loaders` has each apart.

    It holds some numbers for each stretch of neighbouring samples in memory, no predictions. (After a sampler of one's
    own, which gives the samples in no order, these are 24 bytes a sample.)

    Args:
        folder: What `fairlead predict --out` or `DistributedPredictionWriter` has written.

    Raises:
        CheckpointError: There are no predictions, they are not complete, or a file is not as it was written.

    Example:
        >>> predictions = Predictions("out")                    # doctest: +SKIP
        >>> len(predictions), predictions[7], predictions[-2:]  # doctest: +SKIP
        >>> predictions.to_torch()                              # doctest: +SKIP
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder)
        manifest = _manifest(self.folder)
        damage = verify(self.folder, deep=False)
        if damage:
            raise CheckpointError(
                "the predictions are damaged",
                where=str(self.folder),
                why="\n".join(map(str, damage[:5])),
                fix="predict again into another folder",
            )
        files = [ShardFile(self.folder / name) for name in sorted(manifest.files) if name.endswith(".safetensors")]
        count = int(manifest.metadata["loaders"])
        self.loaders: tuple[LoaderPredictions, ...] = tuple(
            LoaderPredictions([file for file in files if file.about.loader == number]) for number in range(count)
        )
        """The predictions of each loader, sequences as this one."""
        self._begins = list(itertools.accumulate(map(len, self.loaders), initial=0))

    def __len__(self) -> int:
        """How many samples were predicted."""
        return self._begins[-1]

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> list[Any]: ...
    def __getitem__(self, place: int | slice) -> Any:
        """One prediction, or those of a slice as a list."""
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        at = place_of(place, len(self))
        number = next(n for n, begin in enumerate(self._begins[1:]) if at < begin)
        return self.loaders[number][at - self._begins[number]]

    def __iter__(self) -> Iterator[Any]:
        """All predictions, of which a few are in memory at a time."""
        return itertools.chain.from_iterable(self.loaders)

    def __repr__(self) -> str:
        return f"Predictions({str(self.folder)!r}): {len(self)} samples"

    def verify(self) -> None:
        """Compares every byte with the checksums; CheckpointError says which file has changed."""
        damage = verify(self.folder, deep=True)
        if damage:
            raise CheckpointError(
                "the predictions are damaged", where=str(self.folder), why="\n".join(map(str, damage[:5]))
            )

    def to_torch(self) -> Any:
        """All predictions in memory, as one batch: tensors of shape `(samples, ...)`, lists for what is no such tensor.

        With several loaders a list, with what each gave. See `LoaderPredictions.to_torch`.
        """
        made = [one.to_torch() for one in self.loaders]
        return made[0] if len(made) == 1 else made

    def to_parquet(self, path: str | PathLike[str]) -> None:
        """Writes a Parquet file, a column for each part of a record, some thousand samples at a time; needs pyarrow.

        `index` is that of the sample, `loader` that of its loader where there are several. A tensor of one number a
        sample is a column of numbers, one of more a list of numbers, row by row.

        Raises:
            MissingDependencyError: pyarrow is not installed.
            ConfigError: A column has what Parquet has no type for.
        """
        write_parquet(self.loaders, Path(path))


def _manifest(folder: Path) -> Manifest:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        begun = folder.is_dir() and any(folder.glob("loader-*.safetensors"))
        raise CheckpointError(
            "these predictions are not complete" if begun else "there are no predictions",
            where=str(folder),
            why="the prediction has not ended" if begun else error.why,
            fix="run it again with the same folder: it resumes where it stopped" if begun else None,
        ) from None
    if manifest.metadata.get("predictions") != 1:
        raise CheckpointError("these are no predictions", where=str(folder), why="its manifest is of something else")
    return manifest

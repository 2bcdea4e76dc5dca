"""`DistributedPredictionWriter`: what all ranks predict, streamed into one folder that `Predictions` reads."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from fairlead.errors import ConfigError, FairleadError
from fairlead_distributed.info import get_rank
from fairlead_distributed.objects import broadcast_object, gather_objects
from fairlead_distributed.predictions.batches import (
    Drawn,
    Stream,
    batches_of,
    drawing,
    is_indexed,
    require_one_rank,
    share,
)
from fairlead_distributed.predictions.folder import PredictionFolder, last_number
from fairlead_distributed.predictions.reading import Predictions
from fairlead_distributed.predictions.records import split
from fairlead_distributed.predictions.shard_file import Batch
from fairlead_lightning import compat
from fairlead_runs import fingerprint
from fairlead_runs.describe import counted, described

_MIB: Final = 1 << 20


@compat.only_its_own_batch_hooks
class DistributedPredictionWriter(L.Callback):
    """Streams what `trainer.predict` predicts on all ranks into one folder, which `Predictions` reads.

    Whole batches are dealt out to the ranks, so that any number of ranks predicts the same, each sample once, and it is
    saved under its index in the dataset. The loader's own sampler says which samples there are;
    `drop_last` does not count, and `limit_predict_batches` counts the batches of all ranks together. Started again
    after a kill, it does only what is in no shard yet; a folder of other weights, or of another job, is refused. Give
    `predict` `return_predictions=False`, or Lightning keeps everything in memory, too.

    Args:
        output_dir: Where they are written, new or empty, or the folder of an interrupted prediction; None: the next
            `predictions-N` in the trainer's `default_root_dir`.
        shard_mib: How much of a rank's predictions are gathered before they are written, while the next are gathered.
        flush_s: After so many seconds they are written even so: what a kill may cost.

    Example:
        >>> writer = DistributedPredictionWriter("out")                          # doctest: +SKIP
        >>> trainer = L.Trainer(devices=8, callbacks=[writer])                    # doctest: +SKIP
        >>> trainer.predict(model, loader, return_predictions=False)              # doctest: +SKIP
        >>> Predictions("out")[0]                                                 # doctest: +SKIP
    """

    def __init__(
        self,
        output_dir: str | PathLike[str] | None = None,
        *,
        shard_mib: float = 64,
        flush_s: float = 300,
    ) -> None:
        self.output_dir = Path(output_dir).absolute() if output_dir is not None else None
        self.shard_bytes = shard_mib * _MIB
        self.flush_s = flush_s
        self.path: Path | None = None
        """Where the last prediction was written."""
        self.run: Path | None = None
        self.job: Mapping[str, Any] | None = None
        self.say: Callable[[str], object] = rank_zero_info
        self._folder: PredictionFolder | None = None
        self._ran = False
        self._reset()

    def _reset(self) -> None:
        self._sources: list[Drawn | Stream] = []
        self._pending: list[Batch] = []
        self._loader = 0
        self._size = 0
        self._flushed_at = time.monotonic()
        self._undo: list[Callable[[], Any]] = []
        self._limit: float | int | None = None
        self._part, self._writes = (1, 0), True

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Takes the loaders of a prediction, which is about to begin."""
        if stage != "predict":
            return
        if is_param_in_hook_signature(pl_module.predict_step, "dataloader_iter", explicit=True):
            raise ConfigError(
                "a predict_step with dataloader_iter draws batches that cannot be numbered",
                where="predict_step",
                fix="predict_step(self, batch, batch_idx)",
            )
        self._reset()
        self._ran = True
        self._limit = trainer.limit_predict_batches
        self._undo.append(partial(setattr, trainer, "limit_predict_batches", self._limit))
        trainer.limit_predict_batches = 1.0  # what is left out is left out here, the same on any number of ranks
        self._undo.append(compat.take_prediction_loaders(trainer, partial(self._prepared, trainer)))

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Takes what was predicted for a batch, and writes a shard where there is enough."""
        source = self._sources[dataloader_idx]
        if isinstance(source, Stream):
            samples = extract_batch_size(batch) if source.batched else None
            taken = source.taken(samples or 1)
        else:
            drawn = source.taken()
            if drawn is None:
                return  # padding: another rank has predicted it
            taken, samples = drawn, len(drawn[1]) if source.batches.size is not None else None
        if dataloader_idx != self._loader:
            self._flush()
            self._loader = dataloader_idx
        number, indices = taken
        made = Batch(number, indices, *split(outputs, samples))
        self._pending.append(made)
        self._size += made.nbytes()
        if self._size >= self.shard_bytes or time.monotonic() - self._flushed_at >= self.flush_s:
            self._flush()

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes what is left, and makes the folder readable once all ranks have."""
        folder = self._folder
        assert folder is not None
        self._flush()
        folder.commit()
        self.path = folder.path
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Saves what is predicted already, for a start that continues; Lightning calls no `teardown` then."""
        try:
            self._flush()
            if self._folder is not None:
                self._folder.settle()
        except FairleadError as second:  # the first error is the one to report
            exception.add_note(f"what was predicted last could not be written either: {second.what}: {second.why}")
        self._close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Gives the loaders back."""
        self._close()

    def predictions(self) -> Predictions | None:
        """What was written; None where no prediction has run."""
        path = self.path
        if not self._ran:  # in ranks that were spawned from this process
            last = last_number(self.run) if self.run is not None else 0
            path = self.output_dir or (self.run / f"predictions-{last}" if self.run is not None and last else None)
        return Predictions(path) if path is not None else None

    def _prepared(self, trainer: L.Trainer, loader: Any) -> Any:
        """One loader after the other, as the user made it: a copy that draws this rank's batches."""
        if self._folder is None:
            run = self.run or Path(trainer.default_root_dir)
            self._folder = PredictionFolder(self.output_dir, run, self._settings(trainer))
            # Ranks that share a model's layers predict the same samples, and the first of them writes.
            shards = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
            self._part = int(shards["num_replicas"]), int(shards["rank"])
            self._writes = gather_objects(self._part).index(self._part) == get_rank()
            self._report_found(self._folder)
        folder, number = self._folder, len(self._sources)
        if not is_indexed(loader):
            return self._streamed(trainer, loader, folder, number)
        batches = batches_of(loader, number).first(self._limit)
        done = folder.add_loader(number, {**_data_of(loader), **batches.described()}, len(batches))
        left = done.left(len(batches))
        drawn = Drawn(batches, share(left, *self._part), padding=int(left[0]) if len(left) else 0)
        self._sources.append(drawn)
        # Without a length Lightning does not warn of a loader that is through.
        return drawing(loader, drawn) if len(drawn) else iter(())

    def _streamed(self, trainer: L.Trainer, loader: Any, folder: PredictionFolder, number: int) -> Any:
        require_one_rank(loader, self._part[0])
        limit = self._limit
        if isinstance(limit, float):
            limit = None if limit == 1.0 else int(_length(loader) * limit)
        done = folder.add_loader(number, {**_data_of(loader), "limit": limit}, None)
        stream = Stream(loader, len(done.numbers), done.samples, limit=limit, ended=folder.complete)
        self._sources.append(stream)
        return stream

    def _settings(self, trainer: L.Trainer) -> Mapping[str, Any]:
        """Weights and job, as rank 0 has them. A collective."""
        module = trainer.lightning_module
        data = getattr(trainer, "datamodule", None)
        job = self.job or {"model": described(module), "data": described(data) if data is not None else None}
        settings = fingerprint({**job, "trainer": {"precision": str(trainer.precision)}}).settings
        weights = {name: _digest(value) for name, value in trainer.strategy.lightning_module_state_dict().items()}
        return broadcast_object({"weights": weights, "job": settings})

    def _report_found(self, folder: PredictionFolder) -> None:
        if folder.complete:
            self.say(f"{folder.path} has these predictions already; nothing to do")
        elif folder.shards:
            self.say(f"resumes the predictions in {folder.path}: {counted(folder.shards, 'shard')} there")

    def _flush(self) -> None:
        batches, self._pending, self._size = self._pending, [], 0
        self._flushed_at = time.monotonic()
        if batches and self._folder is not None and self._writes:
            self._folder.write(self._loader, batches)

    def _close(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()
        undo, self._undo = self._undo, []
        for one in undo:
            one()
        self._pending = []


def predict_distributed(
    trainer: L.Trainer, output_dir: str | PathLike[str] | None, run: Path, job: Mapping[str, Any], **given: Any
) -> Predictions | None:
    """`Trainer.distributed_predict`, with a writer whose own folders are in the run directory."""
    writer = DistributedPredictionWriter(output_dir)
    writer.run, writer.say = run, vars(trainer)["progress"].say
    writer.job = {name: job[name] for name in ("model", "data")}
    callbacks: list[L.Callback] = vars(trainer)["callbacks"]
    callbacks.append(writer)
    try:
        trainer.predict(return_predictions=False, **given)
    finally:
        callbacks.remove(writer)
    return writer.predictions()


def _data_of(loader: Any) -> dict[str, Any]:
    data = loader.dataset if isinstance(loader, DataLoader) else loader
    kind = type(data)
    workers = {"num_workers": loader.num_workers} if isinstance(loader, DataLoader) and not is_indexed(loader) else {}
    return {"dataset": f"{kind.__module__}:{kind.__qualname__}", **workers}


def _length(loader: Any) -> int:
    """The number of batches of a loader, of which `limit_predict_batches` is a share."""
    try:
        return len(loader)
    except TypeError as error:
        raise ConfigError(
            "no share can be taken of a loader that has no length",
            where="trainer.limit_predict_batches",
            why=str(error),
            fix="write a number of batches, as 100, or 1.0 for all; or give the dataset a __len__",
        ) from error


def _digest(value: Any) -> str:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    value = value.detach().cpu().contiguous()
    content = hashlib.sha256(f"{value.dtype} {list(value.shape)}".encode())
    if value.numel():
        content.update(memoryview(value.reshape(-1).view(torch.uint8).numpy()))
    return content.hexdigest()[:16]

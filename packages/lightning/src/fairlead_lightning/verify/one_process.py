"""What stands for the user's loader and ranks in the one process: noted batches, of all replicas for each step."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import lightning.pytorch as L
import numpy as np
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from fairlead.config import JobConfig
from fairlead.interfaces import BuildContext
from fairlead.user_code import CodeRoot
from fairlead_distributed.threads import use_threads
from fairlead_lightning.build import trainer_arguments
from fairlead_lightning.checkpoint.rebuilt import build_user_object
from fairlead_lightning.module_reduce import lend_all_reduce
from fairlead_lightning.verify.batches import detached

GlobalBatch = list[Any]
"""What is trained on at once: one batch, or those of all replicas, one after the other."""


class Batches:
    """A loader of what it is given, with the length of the layout's and otherwise as the user's own.

    Args:
        batches: Of each the first part; `PartByPart` takes the others.
        length: What `len` says; None: the loader has no length.
        real: The user's loader, whose dataset and other attributes this one has.
    """

    def __init__(self, batches: Sequence[GlobalBatch], length: int | None, real: Any = None) -> None:
        self._noted = batches
        self._length = length
        self._real = real

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"object of type {type(self._real or self).__name__!r} has no len()")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return (detached(parts[0]) for parts in self._noted)  # a training step may change its batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__dict__.get("_real") is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._real, name)

    def __getitem__(self, key: Any) -> Any:
        return self._real[key]


def stand_in(batches: Sequence[GlobalBatch], length: int | None, real: Any) -> Any:
    """The noted batches instead of a loader; a DataLoader stays one, for code that asks for its type."""
    if not isinstance(real, DataLoader):
        return Batches(batches, length, real)
    kind = type(real)
    noted = Batches(batches, length, real)
    members = {"__iter__": lambda self: iter(noted), "__len__": lambda self: len(noted), "__module__": kind.__module__}
    made: Any = object.__new__(type(kind.__name__, (kind,), members))
    vars(made).update(vars(real))
    return made


class PartByPart(L.Callback):
    """Has `training_step` run once for each replica's batch of a step, as on its rank: the loss is their mean.

    Each pass begins with the buffers and the plain attributes (counters) that the step began with; those of the first
    replica stay, as rank 0's do.
    """

    def __init__(self, batches: Sequence[GlobalBatch]) -> None:
        self._batches = batches

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """In front of the user's method, on this module alone."""
        real = pl_module.training_step

        @functools.wraps(real)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            return self._step(trainer, pl_module, real, *args, **kwargs)

        vars(pl_module)["training_step"] = training_step

    def _step(
        self, trainer: L.Trainer, module: L.LightningModule, real: Callable[..., Any], batch: Any, *args: Any, **kw: Any
    ) -> Any:
        before = _State(module)
        outputs = [real(batch, *args, **kw)]
        after = _State(module)
        for part in self._batches[trainer.fit_loop.batch_idx][1:]:
            before.restore(copies=True)
            moved: Any = trainer.precision_plugin.convert_input(detached(part))
            moved = trainer.strategy.batch_to_device(moved, dataloader_idx=0)
            outputs.append(real(moved, *args, **kw))
        after.restore(copies=False)
        return _mean(outputs)


class _State:
    """Buffers and plain attributes of a module's parts."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())
        self._buffers = [dict(part._buffers) for part in self._parts]
        self._values = [{n: None if b is None else b.clone() for n, b in one.items()} for one in self._buffers]
        self._plain = [{n: v for n, v in vars(p).items() if isinstance(v, int | float)} for p in self._parts]

    def restore(self, *, copies: bool) -> None:
        """The objects themselves, or copies of what they held: autograd may still need the former."""
        for part, buffers, values, plain in zip(self._parts, self._buffers, self._values, self._plain, strict=True):
            for name in buffers:
                value = values[name]
                part._buffers[name] = (value.clone() if value is not None else None) if copies else buffers[name]
            vars(part).update(plain)


def _mean(outputs: Sequence[Any]) -> Any:
    first = outputs[0]
    if any(one is None for one in outputs):
        return None
    if isinstance(first, Mapping):
        return {**first, "loss": _mean([one["loss"] for one in outputs])}
    total: Tensor = sum(outputs[1:], first)
    return total / len(outputs)


class OtherSeeds(TorchFunctionMode):
    """Gives generators other seeds when they are first used: those of the module, and those that torch is handed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._known: list[torch.Generator] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if isinstance(generator, torch.Generator) and not any(generator is one for one in self._known):
            self._known.append(generator)
            generator.manual_seed(self._seed)
        return func(*args, **kwargs)

    def of_module(self, module: nn.Module) -> None:
        """Those that it keeps, of numpy and of Python too."""
        for part in module.modules():
            for name, value in list(vars(part).items()):
                if isinstance(value, np.random.Generator):
                    vars(part)[name] = np.random.default_rng(self._seed)
                elif isinstance(value, np.random.RandomState | random.Random):
                    value.seed(self._seed)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """With another number of threads, sums are cut elsewhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class JobBuild:
    """Builds from a job whose layout is one process; a Lightning Trainer without a run directory."""

    def __init__(self, job: JobConfig, root: CodeRoot, context: BuildContext) -> None:
        self._job = job
        self._root = root
        self._context = context
        self._data: L.LightningDataModule | None = None
        use_threads(context.resolution, context.environ)

    def model(self) -> L.LightningModule:
        """The job's model."""
        return cast("L.LightningModule", build_user_object(self._job.model, self._root, "model", L.LightningModule))

    def data(self) -> L.LightningDataModule | None:
        """The job's datamodule, set up once: reading the data again would change nothing."""
        if self._data is None and self._job.data is not None:
            made = build_user_object(self._job.data, self._root, "data", L.LightningDataModule)
            self._data = cast("L.LightningDataModule", made)
        elif self._data is not None:
            vars(self._data).update(prepare_data=_nothing, setup=_nothing)
        return self._data

    def trainer(self, precision: str, accumulate: int, steps: int, callbacks: Sequence[L.Callback]) -> L.Trainer:
        """Lightning's own Trainer with the job's settings, on one device."""
        arguments: dict[str, Any] = trainer_arguments(self._context, self._root)
        # Nothing is saved, and the precision is this training's.
        arguments["plugins"] = [one for one in arguments["plugins"] if not isinstance(one, CheckpointIO | Precision)]
        arguments["callbacks"] = [_AllReduce(), *arguments["callbacks"], *callbacks]
        arguments |= {"precision": precision, "accumulate_grad_batches": accumulate, "max_steps": steps}
        arguments |= {"max_epochs": 1, "enable_checkpointing": False, "enable_progress_bar": False}
        return L.Trainer(**arguments)


class _AllReduce(L.Callback):
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        lend_all_reduce(pl_module)


def _nothing(*_: Any, **__: Any) -> None:
    return None

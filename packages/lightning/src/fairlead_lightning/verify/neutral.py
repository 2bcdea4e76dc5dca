"""What would make two right trainings differ: dropout is set to 0, and callbacks that stop or save are left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import lightning.pytorch as L
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, LearningRateFinder, Timer
from torch import nn

from fairlead.checks import CheckedJob
from fairlead.user_code import CodeRoot, import_callable

_LEFT_OUT: Final = (Checkpoint, EarlyStopping, LearningRateFinder, Timer)
_RATES: Final = ("dropout", "drop_path", "drop_prob", "droppath")


def without_dropout(module: nn.Module) -> int:
    """Sets the rate of every dropout to 0: that of layers, and what layers keep for `functional.dropout`; how many."""
    changed = 0
    for part in module.modules():
        for name in _rates(part):
            if getattr(part, name) > 0:
                setattr(part, name, 0.0)
                changed += 1
    return changed


def _rates(part: nn.Module) -> Iterator[str]:
    drops = any("drop" in base.__name__.lower() for base in type(part).__mro__)
    for name, value in list(vars(part).items()):
        if isinstance(value, float) and ((name == "p" and drops) or any(word in name.lower() for word in _RATES)):
            yield name


def without_stops(checked: CheckedJob) -> CheckedJob:
    """The job without the callbacks that end a training early, or save."""
    resolution, job = checked.resolution, checked.loaded.job
    assert resolution is not None
    assert job is not None
    others = [one for one in job.trainer.callbacks if not stops(one.class_, checked.loaded.root)]
    trainer = job.trainer.model_copy(update={"callbacks": others})
    loaded = dataclasses.replace(checked.loaded, job=job.model_copy(update={"trainer": trainer}))
    return dataclasses.replace(checked, loaded=loaded, resolution=dataclasses.replace(resolution, trainer=trainer))


def without_ends(callbacks: Iterable[L.Callback]) -> None:
    """Has the user's callbacks do nothing when a fit has ended: draw samples, plot, upload."""
    for callback in callbacks:
        if not type(callback).__module__.startswith("fairlead"):
            vars(callback)["on_fit_end"] = _nothing


def _nothing(*_: Any) -> None:
    return None


def stops(path: str, root: CodeRoot) -> bool:
    """Whether `module:Class` is a callback that ends a training early, or saves."""
    found = import_callable(path, root, where="trainer.callbacks")
    return isinstance(found, type) and issubclass(found, _LEFT_OUT)


def local_batch_norms(module: nn.Module) -> list[str]:
    """Names of layers whose statistics are of the batch of one rank alone."""
    return [name for name, part in module.named_modules() if _of_one_rank(part)]


def local_statistics(module: nn.Module) -> list[str]:
    """Names of buffers that hold statistics of one rank's batches on purpose: running means of batch norms."""
    kind = nn.modules.batchnorm._NormBase
    parts = [(name, part) for name, part in module.named_modules() if isinstance(part, kind)]
    local = [(name, part) for name, part in parts if part.training and "Sync" not in type(part).__name__]
    return [f"{name}.{buffer}" if name else buffer for name, part in local for buffer, _ in part.named_buffers()]


def _of_one_rank(part: Any) -> bool:
    kind = type(part).__name__
    return isinstance(part, nn.modules.batchnorm._BatchNorm) and "Sync" not in kind and part.training


def flat(names: Sequence[str], shown: int = 3) -> str:
    """`a, b, c and 4 more`."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")

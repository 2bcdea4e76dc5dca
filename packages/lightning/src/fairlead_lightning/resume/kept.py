"""What the user's model, callbacks and data keep in attributes, which no checkpoint of Lightning's has."""

from __future__ import annotations

import dis
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Final

import lightning.pytorch as L
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelSummary
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fairlead.findings import Inexact
from fairlead_distributed.attributes import Attributes
from fairlead_distributed.run.registry import is_stateful
from fairlead_distributed.user_objects import is_engines

_OF_LIGHTNING: Final = ("_hparams", "_hparams_initial", "_hparams_name", "_log_hyperparams", "_trainer", "trainer")


_SET_IN_TRAINING: Final = frozenset(
    {"accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "check_val_every_n_epoch"}
)


def internal(holder: object) -> frozenset[str]:
    """The attributes of a module or data module that torch and Lightning keep for themselves."""
    if isinstance(holder, L.LightningDataModule):
        return frozenset({*vars(L.LightningDataModule()), *_OF_LIGHTNING})
    base = L.LightningModule if isinstance(holder, L.LightningModule) else nn.Module
    return frozenset({*vars(base()), *_OF_LIGHTNING, "_fabric"}) if isinstance(holder, nn.Module) else frozenset()


def _not_kept(holder: object) -> frozenset[str]:
    """As `internal`, less the hyperparameters, which a finder sets; Lightning makes empty ones where there are none."""
    return internal(holder) - ({"_hparams"} if vars(holder).get("_hparams") else set())


def _of_bases(kind: type) -> frozenset[str]:
    """The attributes that engines' classes among the bases set: what has to outlive a stop is in their own state."""
    engines = [base for base in kind.__mro__ if base is not object and is_engines(base)]
    functions = [one for base in engines for one in vars(base).values() if inspect.isfunction(one)]
    return frozenset(
        str(step.argval) for one in functions for step in dis.get_instructions(one) if step.opname == "STORE_ATTR"
    )


def watch_users(trainer: L.Trainer, kept: Attributes) -> None:
    """Watches what the user's code of a fit keeps in modules, callbacks and data module, and sets of the trainer."""
    model, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
    callbacks: list[L.Callback] = vars(trainer)["callbacks"]
    configs = trainer.lr_scheduler_configs
    kept.elsewhere(trainer, trainer.strategy, *model.modules(), *callbacks, *trainer.loggers, data)
    kept.elsewhere(*trainer.optimizers, *configs, *(config.scheduler for config in configs))
    kept.watch("trainer", trainer, only=_SET_IN_TRAINING)
    for path, module in model.named_modules():
        if not is_engines(type(module)):
            kept.watch(f"model {path}".rstrip(), module, _not_kept(module))
    count: Counter[str] = Counter()
    for callback in callbacks:
        name = type(callback).__name__
        count[name] += 1
        if not is_engines(type(callback)):
            kept.watch(f"callback {name}" + f" {count[name]}" * (count[name] > 1), callback, _of_bases(type(callback)))
    if data is not None and not is_engines(type(data)):
        kept.watch(f"data {type(data).__name__}", data, _not_kept(data))


def is_finder(callback: L.Callback) -> bool:
    """Whether it looks for a learning rate or a batch size before the training, and sets an attribute to it."""
    return isinstance(callback, (LearningRateFinder, BatchSizeFinder))


def only_once(trainer: L.Trainer) -> Callable[[], None]:
    """A fit that resumes has found its learning rate and batch size and shown its model before.  Returns the undo."""
    callbacks = vars(trainer)["callbacks"]
    done = [vars(one) for one in callbacks if is_finder(one) or isinstance(one, ModelSummary)]
    for attributes in done:
        attributes["on_fit_start"] = lambda *_: None

    def undo() -> None:
        for attributes in done:
            attributes.pop("on_fit_start", None)

    return undo


def watch_loader(kept: Attributes, name: str, loader: object) -> None:
    """Watches what a loader's dataset and `collate_fn` keep in this process.

    Of one with a state: its generator, and a dataset that can be indexed.
    """
    stateful = is_stateful(loader)
    if stateful:
        kept.watch(name, SimpleNamespace(generator=getattr(loader, "generator", None)))
    if not isinstance(loader, DataLoader):
        return
    collate = getattr(loader.collate_fn, "__self__", loader.collate_fn)
    for part, one in (("dataset", loader.dataset), ("collate_fn", collate)):
        known = hasattr(one, "__dict__") and not is_stateful(one)
        if known and not (stateful and isinstance(one, IterableDataset)):
            kept.watch(f"{name} {part}", one)


def reasons(kept: Attributes) -> Iterator[Inexact]:
    """What has changed and is in no checkpoint."""
    for place, why in sorted(kept.left.items()):
        yield Inexact(
            place,
            why=why,
            fix="keep plain data there, give its class state_dict and load_state_dict, "
            "or name what is to be saved in resume_attributes",
            certain=False,
        )

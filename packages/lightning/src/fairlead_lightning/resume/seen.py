"""What a start has seen that keeps a resume from being exact: written down for `explain`, and said once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from fairlead.errors import RunDirectoryError
from fairlead.exactness import EXACTNESS_FILE, record, sentence, verdict
from fairlead.findings import Inexact
from fairlead_distributed.worker_seeds import own_generators
from fairlead_lightning.loggers.positions import Positioned
from fairlead_runs.commit import atomic_write


def state_reasons(trainer: L.Trainer) -> list[Inexact]:
    """What of the model, its hooks and the callbacks keeps a state that no checkpoint has."""
    reasons = []
    if is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
        reasons.append(
            Inexact(
                "training_step(self, dataloader_iter)",
                why="the step takes its batches itself, and they are not counted",
                fix="take batch and batch_idx",
            )
        )
    callbacks: list[L.Callback] = vars(trainer)["callbacks"]
    ours = __name__.partition(".")[0]
    users = [one for one in callbacks if type(one).__module__.partition(".")[0] != ours]
    for holder in (trainer.lightning_module, *users):
        held = {name: value for name, value in vars(holder).items() if name not in ("_trainer", "trainer", "_fabric")}
        reasons += [
            Inexact(
                f"{name.removeprefix('_modules.')} of {type(holder).__name__}",
                why="a generator of its own, whose state is in no checkpoint",
                fix="draw from torch's global generator, or save it in on_save_checkpoint",
                certain=False,
            )
            for name in own_generators(held)
        ]
    return reasons


def script_reasons(trainer: L.Trainer, *, seeded: bool, in_order: bool) -> Iterator[Inexact]:
    """What a script's own Trainer has decided: nothing but the object says it.

    Args:
        trainer: It.
        seeded: Whether the script has called `seed_everything`.
        in_order: Whether gradients are added in an order that does not depend on when the run was started.
    """
    if not seeded:
        yield Inexact(
            "the script's random numbers",
            why="nothing has seeded them: a start before the first checkpoint begins with other weights",
            fix="lightning.pytorch.seed_everything(1, workers=True) as the script's first line",
        )
    device = trainer.strategy.root_device.type
    if device == "cuda" and not torch.are_deterministic_algorithms_enabled():
        yield Inexact(
            "Trainer(deterministic=...)",
            why="sums on a GPU are added in an order of their own, unless kernels are chosen that do not",
            fix="Trainer(deterministic=True)",
        )
    elif device == "cuda" and torch.is_deterministic_algorithms_warn_only_enabled():
        yield Inexact(
            "Trainer(deterministic='warn')",
            why="operations without a deterministic kernel only warn, and are computed in an order of their own",
            fix="Trainer(deterministic=True)",
        )
    elif device not in ("cpu", "cuda"):
        yield Inexact(
            f"the device {device}",
            why="no test has shown that it computes the same bits twice",
            fix="a CPU or CUDA",
            certain=False,
        )
    if device == "cuda" and torch.backends.cudnn.benchmark:
        yield Inexact(
            "Trainer(benchmark=True)",
            why="cuDNN measures its kernels at every start, and may choose others that round in another way",
            fix="Trainer(benchmark=False)",
        )
    strategy = trainer.strategy
    if not in_order:
        yield Inexact(
            f"DistributedDataParallel with {trainer.world_size} ranks",
            why="a resumed run adds the gradients of its first step in another order",
            fix="DDPStrategy(find_unused_parameters=True), or fairlead.Trainer with exact_reduction: on",
        )
    if not isinstance(strategy, (DDPStrategy, SingleDeviceStrategy)):
        yield Inexact(
            f"the strategy {type(strategy).__name__}",
            why="it was not tried in a script",
            fix="fairlead.Trainer",
            certain=False,
        )
    yield from _script_loops(trainer)


def _script_loops(trainer: L.Trainer) -> Iterator[Inexact]:
    settings: Any = trainer  # Lightning sets these without a declaration
    if not isinstance(getattr(trainer, "val_check_interval", None), (int, float)):  # Lightning keeps no duration there
        yield Inexact(
            "Trainer(val_check_interval=...)",
            why="validation comes by the clock, so no two runs validate at the same steps",
            fix="give a number of batches, or a fraction of an epoch",
        )
    if any(isinstance(callback, Timer) for callback in settings.callbacks):
        yield Inexact(
            "Trainer(max_time=...), or the callback Timer",
            why="training ends by the clock, so no two runs end at the same step",
            fix="max_steps or max_epochs",
        )
    if settings.reload_dataloaders_every_n_epochs > 1:
        yield Inexact(
            f"Trainer(reload_dataloaders_every_n_epochs={settings.reload_dataloaders_every_n_epochs})",
            why="each start builds new loaders, even in an epoch in which an undisturbed run keeps them",
            fix="Trainer(reload_dataloaders_every_n_epochs=1), or 0",
        )
    if settings.overfit_batches:
        yield Inexact(
            "Trainer(overfit_batches=...)",
            why="Lightning replaces the samplers of the loaders, and no test has resumed that",
            fix="limit_train_batches and limit_val_batches",
            certain=False,
        )


def uncut_loggers(loggers: Sequence[Logger]) -> list[str]:
    """Loggers that hold a step twice when it is done again: nothing can cut them back."""
    return sorted({type(logger).__name__ for logger in loggers if not isinstance(logger, Positioned)})


def write_record(start: Path, settings: list[Inexact], state: list[Inexact], world_size: int, job: str) -> None:
    """Writes down what was seen; on rank 0.

    Args:
        start: The folder of this start; it is made if it is not there.
        settings: What the settings say.
        state: What was seen of loaders and state.
        world_size: Ranks in all.
        job: The `job_digest`.

    Raises:
        RunDirectoryError: It cannot be written.
    """
    content = record(settings=settings, seen=state, world_size=world_size, job=job)
    try:
        start.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError("cannot write what was seen", where=str(start), why=error.strerror) from error
    text = json.dumps(content, indent=1) + "\n"
    atomic_write(start / EXACTNESS_FILE, text.encode(), error=RunDirectoryError)


def said(reasons: list[Inexact]) -> str | None:
    """What to tell the user at a start; None where nothing speaks against an exact resume."""
    if not reasons:
        return None
    return "\n".join([f"resume is {verdict(reasons)}:", *(f"  {sentence(reason)}" for reason in reasons)])

"""The private parts of `transformers.Trainer` that are used, in one room; `integration_tests/huggingface` tries each.

What may change without notice: `_save_checkpoint(model, trial)` writes into the folder `checkpoint-<step>` of
`_get_output_dir(trial)`; `_tr_loss` and `_globalstep_last_logged` are the losses since the last log.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import Trainer, TrainingArguments

from fairlead.errors import ConfigError


def maker(args: TrainingArguments) -> Trainer:
    """The Trainer that is being made with these arguments: no hook gets it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        made = frame.f_locals.get("self")
        if isinstance(made, Trainer) and made.args is args:
            return made
        frame = frame.f_back
    raise ConfigError(
        "no Trainer has made this callback", where="Fairlead", fix="Trainer(..., callbacks=[Fairlead(...)])"
    )


@contextmanager
def saves_through(trainer: Any, save: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Inside it, each save of the Trainer is handed to `save`, as a call that writes."""
    own = trainer._save_checkpoint

    def handed(*arguments: Any, **named: Any) -> None:
        save(lambda: own(*arguments, **named))

    trainer._save_checkpoint = handed
    try:
        yield
    finally:
        del trainer._save_checkpoint


@contextmanager
def writes_into(trainer: Any, folder: Path) -> Iterator[None]:
    """Inside it, the Trainer's output directory is another one."""
    trainer._get_output_dir = lambda trial=None: str(folder)
    try:
        yield
    finally:
        del trainer._get_output_dir


def loss_since_log(trainer: Any) -> dict[str, Any]:
    """The losses since the Trainer has logged last, which it forgets in its own checkpoints."""
    return {"loss": trainer._tr_loss.detach().cpu().clone(), "logged": int(trainer._globalstep_last_logged)}


def restore_loss(trainer: Any, found: Mapping[str, Any]) -> None:
    """Has the first mean that is logged be that of an undisturbed training."""
    if "loss" in found:
        trainer._tr_loss += found["loss"].to(trainer._tr_loss.device)
        trainer._globalstep_last_logged = found["logged"]

"""The private parts of `transformers.Trainer` that are used, in one room; `integration_tests/huggingface` tries each.

What may change without notice: `_save_checkpoint(model, trial)` writes into the folder `checkpoint-<step>` of
`_get_output_dir(trial)`; `_maybe_log_save_evaluate(loss, norm, model, trial, ...)` follows `on_step_end` and
`on_epoch_end`; `_run_epoch` trains an epoch; `_tr_loss` and `_globalstep_last_logged` are the losses since the last
log; `TrainerState.stateful_callbacks` has a callback's state by its class's name, or a list of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

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


class Pass(NamedTuple):
    """A pass over the training data."""

    number: int
    steps_before: int


class Hooks(Protocol):
    """What a run does in a training of the Trainer's."""

    current: Pass
    """The pass that is being made."""
    resumed: Pass | None
    """The one that the first pass continues."""
    over: bool
    """Whether the training had ended when its checkpoint was written, as by early stopping."""

    def save(self, write: Callable[[], None]) -> None:
        """Is handed each save of the Trainer, as a call that writes."""

    def save_due(self) -> bool:
        """Whether to save once the Trainer has logged, evaluated and saved, at the end of a step and of an epoch."""


@contextmanager
def in_a_run(trainer: Any, run: Hooks) -> Iterator[None]:
    """Inside it, the Trainer's saves are the run's, a stream continues where it was, and no step follows the last."""
    write, evaluate, train_epoch = trainer._save_checkpoint, trainer._maybe_log_save_evaluate, trainer._run_epoch
    shift = 0

    def _save_checkpoint(*arguments: Any, **named: Any) -> None:
        run.save(lambda: write(*arguments, **named))

    def _maybe_log_save_evaluate(loss: Any, norm: Any, model: Any, trial: Any, *arguments: Any, **named: Any) -> None:
        evaluate(loss, norm, model, trial, *arguments, **named)
        if run.save_due():
            trainer._save_checkpoint(model, trial)
            trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)

    def _run_epoch(*, epoch: int, epochs_trained: int, train_dataloader: Any, **named: Any) -> None:
        nonlocal shift
        steps, resumed, run.resumed = trainer.state.global_step, run.resumed, None
        if run.over or steps >= trainer.state.max_steps:  # within an epoch, it would take one more
            trainer.control.should_training_stop = True
            return
        before = steps
        if resumed is not None and not has_length(train_dataloader):
            # All steps are one epoch to the Trainer then, and it would skip in this pass what it read in others.
            shift, before = resumed.number - epoch, resumed.steps_before
            epochs_trained = resumed.number
            named["steps_trained_in_current_epoch"] = (steps - before) * trainer.args.gradient_accumulation_steps
        run.current = Pass(epoch + shift, before)
        train_epoch(epoch=epoch + shift, epochs_trained=epochs_trained, train_dataloader=train_dataloader, **named)

    replaced = (_save_checkpoint, _maybe_log_save_evaluate, _run_epoch)
    for method in replaced:
        setattr(trainer, method.__name__, method)
    try:
        yield
    finally:
        for method in replaced:
            delattr(trainer, method.__name__)


@contextmanager
def writes_into(trainer: Any, folder: Path) -> Iterator[None]:
    """Inside it, the Trainer's output directory is another one."""
    trainer._get_output_dir = lambda trial=None: str(folder)
    try:
        yield
    finally:
        del trainer._get_output_dir


def samples(trainer: Any) -> int | None:
    """How many it trains on; None of a stream."""
    return len(trainer.train_dataset) if has_length(trainer.train_dataset) else None


def loss_since_log(trainer: Any) -> dict[str, Any]:
    """The losses since the Trainer has logged last, which it forgets in its own checkpoints."""
    return {"loss": trainer._tr_loss.detach().cpu().clone(), "logged": int(trainer._globalstep_last_logged)}


def restore_loss(trainer: Any, found: Mapping[str, Any]) -> None:
    """Has the first mean that is logged be that of an undisturbed training."""
    if "loss" in found:
        trainer._tr_loss += found["loss"].to(trainer._tr_loss.device)
        trainer._globalstep_last_logged = found["logged"]


def restore_callbacks(trainer: Any, state: TrainerState, *, own: bool) -> None:
    """Gives each callback that has a state, as early stopping its count, the one in a checkpoint of its `own` run.

    The Trainer itself leaves them, unless an argument asks for it, and fails to save one that the checkpoint lacks.
    """
    saved: Any = state.stateful_callbacks
    callbacks: dict[str, list[Any]] = {}
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):
            callbacks.setdefault(type(callback).__name__, []).append(callback)
    for name, found in callbacks.items():
        states = saved.setdefault(name, [one.state() for one in found] if len(found) > 1 else found[0].state())
        states = states if isinstance(states, list) else [states]
        if not own:
            continue
        for callback, one in zip(found, states[-len(found) :], strict=False):  # each save adds to the list
            for attribute, value in one["attributes"].items():
                setattr(callback, attribute, value)

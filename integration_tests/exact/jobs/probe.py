"""What the jobs of this folder share: a callback that says where a rank is, slows a phase down, and ends the process.

The environment asks for it, so that all starts of a job have one fingerprint:

    EXACT_KILL="validation_batch_start:6"      SIGKILL there, at that optimizer step; with `:1` behind it only on rank 1
    EXACT_KILL="train_batch_end*2:4"           the second time that it comes there at that step
    EXACT_PAUSE="validation_batch_start=0.05"  seconds to sleep there; several with spaces between
    EXACT_DISK=0.01                            a slow disk: each fsync, rename and unlink of a commit takes so long

A place is the name of a Lightning hook without its `on_`, or `save`, `publish` or `retention`; a pause can also be for
each `sample` that a loader draws.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L

from fairlead_runs.commit import Syscalls

__all__ = ["DISK", "KILL", "PAUSE", "PLACE", "RESULT", "Probe", "pauses"]

KILL = "EXACT_KILL"
PAUSE = "EXACT_PAUSE"
DISK = "EXACT_DISK"
PLACE = "place-{rank}"
RESULT = "result.json"


class Probe(L.Callback):
    """Writes the place of this rank into `place-0`, ..., and at the end what only the process knows: `result.json`."""

    resume_attributes = ()  # each start kills and writes on its own

    def __init__(self) -> None:
        self._pauses = pauses()
        where, _, rest = os.environ.get(KILL, "").partition(":")
        self._kill, _, times = where.partition("*")
        self._step, _, self._rank = rest.partition(":")
        self._times = int(times or 1)
        self._place: int | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        name = PLACE.format(rank=trainer.global_rank)
        self._place = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._watch_commits(trainer)
        self._at(trainer, "setup")

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._at(trainer, "train_epoch_start")

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self._at(trainer, "train_batch_start")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self._at(trainer, "train_batch_end")

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if not trainer.sanity_checking:
            self._at(trainer, "validation_batch_start")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._at(trainer, "validation_end")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._at(trainer, "train_epoch_end")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """The stage is there with the ranks' own files; the state is not written yet."""
        self._at(trainer, "save")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._at(trainer, "train_end")

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last checkpoint is durable, and nothing else is done with this run."""
        if trainer.is_global_zero:
            best = str(getattr(trainer.checkpoint_callback, "best_model_path", ""))
            metrics = {name: float(value).hex() for name, value in trainer.callback_metrics.items()}
            document = {"best_model_path": best, "callback_metrics": metrics, "stopped": trainer.should_stop}
            temporary = Path(f"{RESULT}.new")
            temporary.write_text(json.dumps(document, indent=1))
            temporary.replace(RESULT)
        self._at(trainer, "fit_end")

    def _watch_commits(self, trainer: L.Trainer) -> None:
        """Places within a commit: `publish` when the checkpoint has its name, `retention` when one is being deleted."""
        seconds = float(os.environ.get(DISK, "0"))
        for call in ("fsync", "fsync_dir", "rename", "unlink") if seconds else ():
            setattr(Syscalls, call, _slowed(getattr(Syscalls, call), seconds))
        rename: Callable[[Syscalls, Path, Path], None] = Syscalls.rename

        def watched(system: Syscalls, source: Path, target: Path) -> None:
            rename(system, source, target)
            if target.parent.name.startswith(".trash-"):
                self._at(trainer, "retention")
            elif source.name.startswith(".stage-"):
                self._at(trainer, "publish")

        type.__setattr__(Syscalls, "rename", watched)

    def _at(self, trainer: L.Trainer, name: str) -> None:
        step = trainer.global_step
        if self._place is not None:
            os.pwrite(self._place, f"{name:<24}{step:<8}\n".encode(), 0)
        if (name, str(step)) == (self._kill, self._step) and self._rank in ("", str(trainer.global_rank)):
            self._times -= 1
            if self._times == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        if name in self._pauses:
            time.sleep(self._pauses[name])


def pauses() -> dict[str, float]:
    """Seconds to sleep, by place."""
    words = (word.partition("=") for word in os.environ.get(PAUSE, "").split())
    return {name: float(seconds) for name, _, seconds in words}


def _slowed(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def slowed(*args: Any) -> Any:
        done = call(*args)
        time.sleep(seconds)  # behind the call: what it did is there, what follows is not
        return done

    return slowed

"""Inside of the ranks of a proof: kills them, and notes what the user's code keeps in memory."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as L

from fairlead_lightning import compat
from fairlead_lightning.commands.prove_memory import remembered
from fairlead_runs.commit import newest_complete


@compat.only_its_own_batch_hooks
class Probe(L.Callback):
    """Takes notes where the checkpoint is made and resumed from, and at the end; kills this rank in between."""

    def __init__(self, plan: str, roots: tuple[Path, ...]) -> None:
        self._plan: dict[str, Any] = json.loads(plan)
        self._roots = roots
        self._noted = False

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """A batch is next: the last one is done, and saved where it was to be."""
        step = trainer.global_step
        if step == self._plan["checkpoint"] and not self._noted:
            self._noted = True
            self._note(trainer, "restored")
        if self._plan["kill"] is None or step < self._plan["kill"]:
            return
        session = getattr(trainer, "session", None)
        # A checkpoint that is written in the background may be on its way still: then it is the next step.
        if session is not None and newest_complete(session.path / "checkpoints").checkpoint is not None:
            (Path(self._plan["notes"]) / f"killed-{trainer.global_rank:05d}").write_text(str(step))
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All steps are done."""
        self._note(trainer, "end")

    def _note(self, trainer: L.Trainer, when: str) -> None:
        path = Path(self._plan["notes"]) / f"{when}-{trainer.global_rank:05d}.json"
        path.write_text(json.dumps(remembered(trainer, self._roots), indent=0))

"""In a rank of `--prove-resume`: saves and ends at the steps of the plan, and notes what the user's code keeps."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import nn

from fairlead.config import RunConfig, TrainerConfig
from fairlead.plugins import PluginManager
from fairlead_distributed.info import get_rank, get_world_size
from fairlead_distributed.plain_data import is_engines
from fairlead_distributed.run.memory import Owner, remembered
from fairlead_launch.prove.plan import END, RESTORED, Plan, at_step, instructions_in, note
from fairlead_runs.commit import newest_complete

_OTHERS_S: Final = 60.0
"""How long rank 0, which may host the store of all, waits for the notes of the others."""
_OF_TORCH: Final = frozenset({*vars(nn.Module()), "training"})


class RankProof:
    """What this start of a training is to do for a proof; its run calls it at each heartbeat."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self._notes = Path(found["notes"])
        self._kills: bool = found["kill"]
        self._plan = Plan(**found["plan"])
        self._runs: str = found["runs"]
        self._resumes: bool = found["resumes"]
        self._to_save = {self._plan.checkpoint, self._plan.steps}
        self._resumed_at: int | None = None
        self._owners: Callable[[], Sequence[Owner]] = list
        self._folders: Sequence[Path] = (Path(sys.argv[0]).absolute().parent, Path.cwd())

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> RankProof | None:
        """The proof that has started this process, if any."""
        found = instructions_in(environ)
        return cls(found) if found is not None else None

    def redirected(self, run: RunConfig) -> RunConfig:
        """The run in the folder of the proof; its own directory is left alone."""
        resume = {"resume": "auto"} if self._resumes else {}
        return run.model_copy(update={"dir": self._runs, "wait": False, **resume})

    def without_requeue(self, config: TrainerConfig, plugins: PluginManager) -> TrainerConfig:
        """The settings with which a signal stops the proof and requeues nothing."""
        none = TrainerConfig.model_validate({"requeue": "none"}, context={"plugins": plugins}).requeue
        return config.model_copy(update={"requeue": none})

    def watch(self, owners: Callable[[], Sequence[Owner]], folders: Sequence[Path] = ()) -> None:
        """Who keeps values beside the user's own modules, called for each note.

        Args:
            owners: The objects.
            folders: Where the user's modules are; by default beside the script and in the working directory.
        """
        self._owners = owners
        self._folders = folders or self._folders

    def saves(self, step: int) -> bool:
        """Whether all ranks are to save after this step; once. With several optimizers a batch has several steps."""
        due = {one for one in self._to_save if one <= step}
        self._to_save -= due
        return bool(due)

    def at(self, run: Path, step: int) -> None:
        """This rank is at a step: takes notes, and ends it where that is planned."""
        plan = self._plan
        if step < plan.checkpoint:
            return
        newest = newest_complete(run / "checkpoints").checkpoint
        saved = newest.step if newest is not None else 0
        # At each heartbeat of the step: what belongs to it, or a script restores, may come late.
        if self._resumes:
            if self._resumed_at is None:
                self._resumed_at = step
                self.saves(step)  # it has its checkpoint
            if step == self._resumed_at:
                self._note(RESTORED)
        elif step <= plan.kill:  # a script may save between the two, and resumes from there
            self._note(RESTORED if step == plan.checkpoint else at_step(step))
        if self._kills and step >= plan.kill and saved >= plan.checkpoint:
            (self._notes / f"killed-{get_rank():05d}").write_text(str(step))
            os.kill(os.getpid(), signal.SIGKILL)
        # Not before that: with several optimizers a step may go past the plan's last one, and be saved behind it.
        if saved >= plan.steps and not self._kills:
            self.end()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # not a line more of the script: what it does after its training is none of the proof's

    def end(self) -> None:
        """The training is over, also where the script has come to its own end."""
        self._note(END)
        until = time.monotonic() + _OTHERS_S
        while get_rank() == 0 and time.monotonic() < until:
            if all(note(self._notes, END, rank).exists() for rank in range(get_world_size())):
                return
            time.sleep(0.01)

    def _note(self, name: str) -> None:
        found = remembered(self._owners(), self._folders)
        note(self._notes, name, get_rank()).write_text(json.dumps(found, indent=0))


def owners_of(modules: Mapping[str, nn.Module]) -> list[Owner]:
    """The parts of modules that are of the user's own classes."""
    return [
        Owner(part, f"model {name}", f"{path}." if path else "", _OF_TORCH, shown=not is_engines(type(part)))
        for name, module in modules.items()
        for path, part in module.named_modules()
    ]

"""Loaders that a module or data module makes anew in some epochs, by what it keeps and by the global generators."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as L

from fairlead_distributed.attributes import Attributes
from fairlead_distributed.rng import rng_state, set_rng_state
from fairlead_lightning import compat


class AskedLoaders:
    """How everything was when the training's loaders were asked for, so that a resumed fit is given the same."""

    def __init__(self) -> None:
        self._state: dict[str, Any] | None = None
        self._at: tuple[int, int] | None = None
        self._validation: Mapping[str, Any] | None = None
        self._validation_before: Mapping[str, Any] | None = None
        self.later = False
        """Whether the fit that this one resumes had not asked for the validation's loaders yet: its training goes on
        before they are asked for."""

    def go_on(self, rank: Mapping[str, Any] | None) -> None:
        """Has the validation's loaders be asked for as in the fit that this one resumes, by the state of its rank."""
        if rank is not None and "asked_validation" in rank:
            self._validation_before = rank["asked_validation"]
            self.later = self._validation_before is None

    @contextmanager
    def validation(self, trainer: L.Trainer) -> Iterator[None]:
        """The validation's loaders are asked for inside the block, and in a resumed fit again."""
        before, self._validation_before = self._validation_before, None
        now = rng_state()
        here = {"rng": now, "epoch": trainer.current_epoch, "step": trainer.global_step}
        self._validation = before if before is not None else here
        if before is not None:
            set_rng_state(before["rng"])
        with compat.as_at(trainer, (before["epoch"], before["step"]) if before is not None else None):
            yield
        if before is not None:
            set_rng_state(now)
            compat.set_validation_asked(trainer, before["epoch"])

    def state(self, kept: Attributes) -> dict[str, Any]:
        """For the checkpoint; of the training's None where they are made once, at the start, as each start does.

        A dataset that took another's place is as it was made: what the other kept is not its own.
        """
        asked = self._state
        if asked is not None:
            own = {name: one for name, one in asked["attributes"].items() if name not in kept.replaced}
            asked = {**asked, "attributes": own}
        validation = self._validation if self._validation is not None else self._validation_before
        return {"asked": asked, "asked_at": self._at, "asked_validation": validation}

    def ask(
        self, trainer: L.Trainer, kept: Attributes, asked_at: tuple[int, int] | None, saved: Mapping[str, Any] | None
    ) -> tuple[int, int] | None:
        """The loaders are asked for now: in a fit that resumes, as at the epoch and step `asked_at`, which it returns.

        With `saved`, of as many ranks, as everything was there.
        """
        self._at = asked_at if asked_at is not None else (trainer.current_epoch, trainer.global_step)
        if not vars(trainer)["reload_dataloaders_every_n_epochs"]:
            return asked_at
        kept.replaced.clear()
        if saved is None:
            self._state = {"attributes": copy.deepcopy(kept.state()), "rng": rng_state()}
            return asked_at
        self._state = dict(saved)
        kept.restore(saved["attributes"])
        set_rng_state(saved["rng"])
        return asked_at

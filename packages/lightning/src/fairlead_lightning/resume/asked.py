"""Loaders that a module or data module makes anew in some epochs, by what it keeps and by the global generators."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as L

from fairlead_distributed.attributes import Attributes
from fairlead_distributed.rng import rng_state, set_rng_state


class AskedLoaders:
    """How everything was when the training's loaders were asked for, so that a resumed fit is given the same."""

    def __init__(self) -> None:
        self._state: dict[str, Any] | None = None

    def state(self, kept: Attributes) -> dict[str, Any] | None:
        """For the checkpoint; None where loaders are made once, at the start, as each start does.

        A dataset that took another's place is as it was made: what the other kept is not its own.
        """
        if self._state is None:
            return None
        attributes: dict[str, Any] = self._state["attributes"]
        return {**self._state, "attributes": {k: v for k, v in attributes.items() if k not in kept.replaced}}

    def ask(self, trainer: L.Trainer, kept: Attributes, saved: Mapping[str, Any] | None) -> float | None:
        """The loaders are asked for now.

        With `saved`, of the fit that this one resumes, as they were there; returns the epoch in which that was.
        """
        if not vars(trainer)["reload_dataloaders_every_n_epochs"]:
            return None
        kept.replaced.clear()
        if saved is None:
            attributes = copy.deepcopy(kept.state())
            self._state = {"attributes": attributes, "rng": rng_state(), "epoch": trainer.current_epoch}
            return None
        self._state = dict(saved)
        kept.restore(saved["attributes"])
        set_rng_state(saved["rng"])
        return float(saved["epoch"])

"""What the user's code and its training change, which no checkpoint of Lightning's has: of all places together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning.pytorch as L

from fairlead.findings import Inexact
from fairlead_distributed.attributes import Attributes
from fairlead_lightning.resume.kept import reasons, watch_users
from fairlead_lightning.resume.layers import Layers
from fairlead_lightning.resume.optimizers import Groups, refused, watch_optimizers


class Users:
    """Attributes, layers and optimizers, from the beginning of a fit.

    Attributes:
        kept: The attributes; loaders are watched there as well, when they are made.
    """

    def __init__(self) -> None:
        self.kept = Attributes()
        self._layers: Layers | None = None
        self._share: Callable[[], None] | None = None
        self._trainer: L.Trainer | None = None
        self._groups: Groups | None = None
        self._begun = False

    def watch(self, trainer: L.Trainer, before: Mapping[str, Any] | None) -> None:
        """The model and its optimizers are made; of these nothing is restored yet, and with `before` it will be."""
        self._trainer = trainer
        self._groups = Groups(trainer.lightning_module, trainer.optimizers)
        if before is not None:
            self._groups.restore(before.get("groups", ()))
        watch_users(trainer, self.kept)
        self._share = watch_optimizers(self.kept, trainer.optimizers)
        self._layers = Layers(trainer.lightning_module)

    def begun(self) -> None:
        """An epoch begins; what was made until the first of them, a resumed fit makes as well."""
        if not self._begun and self._layers is not None:
            self._begun = True
            self.kept.begun()
            self._layers.begun()

    def state(self) -> dict[str, Any]:
        """For the checkpoint of this rank."""
        layers = self._layers.state() if self._layers is not None else {}
        groups = self._groups.state() if self._groups is not None else []
        return {"attributes": self.kept.state(), "layers": layers, "groups": groups}

    def restore(self, state: Mapping[str, Any], *, same_ranks: bool) -> None:
        """Puts it back; what loaders keep belongs to a rank of as many."""
        kept: Mapping[str, Any] = state.get("attributes", {})
        self.kept.restore(kept if same_ranks else {k: v for k, v in kept.items() if not k.startswith("loader")})
        if self._share is not None:
            self._share()
        if self._layers is not None:
            self._layers.restore(state.get("layers", {}))

    def reasons(self) -> Iterator[Inexact]:
        """What has changed and cannot be kept."""
        yield from reasons(self.kept)
        if self._layers is not None:
            yield from self._layers.reasons()
        if self._trainer is not None:
            yield from refused(self._trainer)

"""The batches of samplers that have no state: drawn again from a seed of the epoch."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fairlead_distributed import derive_seed
from fairlead_distributed.attributes import Attributes
from fairlead_distributed.batch_order import EpochPosition, Order, drawn_apart


class RedrawnOrder(Order):
    """Batches that depend on the seed and the epoch alone: they are drawn again, and the first ones are skipped.

    What samplers draw comes from generators of this order; a `torch.Generator` of theirs is seeded for each epoch.
    What they and `further` keep in attributes is put back: for the batches that were drawn before as it was when the
    epoch began, and then as it was at the stop. Workers draw up to `ahead` batches before the training: these are kept.
    `apart` are objects that samplers may hold and that are kept in another way.
    """

    def __init__(
        self, inner: Any, *, ahead: int, further: Mapping[str, object], apart: Sequence[object], **arguments: Any
    ) -> None:
        super().__init__(inner, **arguments)
        self._kept = Attributes()
        self._kept.elsewhere(*apart)
        for name, one in {"batches": inner, "sampler": self.sampler, **further}.items():
            self._kept.watch(name, one)
        self._began: tuple[int, int, dict[str, Any]] = (-1, -1, {})  # epoch, turn, and what was kept then
        self._drawn = 0
        self._ended = False
        self._last: deque[Any] = deque(maxlen=ahead + 2)
        self._kept_before: dict[str, Any] | None = None
        self._began_before: Mapping[str, Any] = {}

    @property
    def left(self) -> Mapping[str, str]:
        """What samplers have changed in attributes and cannot be kept, with the reason."""
        return self._kept.left

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the iterators go on there, until `begun`."""
        super().load_state_dict(state)
        self._kept_before = dict(state["kept"])
        self._kept.restore(self._kept.swap(state["kept"]))  # of all that is kept, what there is at first
        self._kept.restore(state["began"])
        self._began_before = copy.deepcopy(self._kept.state())

    def _taken(self, place: EpochPosition) -> dict[str, Any]:
        turn, skip = self._turns(place.batches)
        kept = self._kept_before if self._kept_before is not None else self._kept.state()
        if self._kept_before is None and self._began[:2] == (place.epoch, turn):
            began, drawn, ended = self._began[2], self._drawn, self._ended
        else:  # between two epochs
            began, drawn, ended = kept, skip, False
        ahead = list(self._last)[skip - drawn :] if drawn > skip else []
        return {
            "turn": turn,
            "skip": skip,
            "drawn": drawn,
            "ended": ended,
            "ahead": ahead,
            "began": began,
            "kept": kept,
        }

    def _begin(
        self, numbers: tuple[int, int, int], place: EpochPosition, state: Mapping[str, Any] | None
    ) -> Iterator[Any]:
        for wanted in (self.inner, self.sampler):
            generator = getattr(wanted, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(derive_seed("sampler", *numbers))
        kept, self._kept_before = self._kept_before, None
        if state is not None:
            self._kept.restore(self._began_before)  # once more where an iterator was made before this one
        elif kept is not None:
            self._kept.restore(kept)
        self._began = place.epoch, numbers[-1], copy.deepcopy(self._kept.state())
        self._drawn, self._ended = int(state["skip"]) if state is not None else 0, False
        self._last.clear()
        batches = drawn_apart(self.inner, derive_seed("order", *numbers))
        return self._counted(batches if state is None else self._further(batches, state))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._drawn += 1
            self._last.append(batch)
            yield batch
        self._ended = True  # what a sampler does behind its last batch is done, too

    def _further(self, batches: Iterator[Any], state: Mapping[str, Any]) -> Iterator[Any]:
        for _ in itertools.islice(batches, int(state["drawn"]) + bool(state["ended"])):
            pass
        self._kept.restore(state["kept"])
        yield from state["ahead"]
        yield from batches

"""How the ranks of a run are laid out: on how many of them a model is copied, sharded and split. Torch-free.

A mesh has these dimensions, outermost first: `pipeline`, `replicate`, `shard`, `context`, `tensor`. Ranks are numbered
along the innermost first, so that the ranks that split each layer, and talk most, lie side by side in a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from fairlead.errors import ConfigError

DIMENSIONS: Final = ("pipeline", "replicate", "shard", "context", "tensor")
"""The dimensions of a mesh, outermost first. `expert` is none: it groups ranks of `shard`, neighbours together."""

Size = Annotated[int, Field(gt=0)]
SizeOrAuto = Size | Literal["auto"]


@dataclass(frozen=True)
class Layout:
    """The sizes of a mesh, whose product is the world size.

    Example:
        >>> layout = Layout.of(8, {"shard": "auto", "tensor": 2})
        >>> str(layout), layout.data_parallel, layout.data_rank(5)
        ('shard 4 x tensor 2', 4, 2)
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    auto: str | None = None
    """Which of them follows from the world size and the others."""

    @classmethod
    def of(cls, world_size: int, sizes: Mapping[str, int | Literal["auto"]], where: str = "trainer.strategy") -> Layout:
        """The layout of `world_size` ranks; sizes that are not given are 1, and one may be `auto`.

        Raises:
            ConfigError: The product is not the world size, or several sizes are `auto`; nothing is adjusted.
        """
        autos = [name for name, size in sizes.items() if size == "auto"]
        given: dict[str, Any] = {name: size for name, size in sizes.items() if size != "auto"}
        if len(autos) > 1:
            raise ConfigError(
                f"{' and '.join(autos)} cannot both be auto",
                where=where,
                why="one of them follows from the number of ranks only if the others are known",
                fix=f"give the number of one of them, such as {autos[0]}: 1",
            )
        if "expert" in autos:
            raise ConfigError(
                "expert cannot be auto",
                where=f"{where}.expert",
                why="it is no factor of the number of ranks, so that it does not follow from the others",
                fix="give the number of ranks of `shard` that share the experts",
            )
        known = prod(given.get(name, 1) for name in DIMENSIONS)
        if autos and world_size % known == 0:
            given[autos[0]] = world_size // known
        elif autos or known != world_size:
            shown = cls(**given)
            count = "1 rank" if world_size == 1 else f"{world_size} ranks"
            raise ConfigError(
                f"{shown} {f'does not divide the {count}' if autos else f'= {known} is not the number of ranks'}",
                where=f"{where}.{autos[0]}" if autos else where,
                why=f"every rank has one position in the mesh, and there are {count}" if not autos else
                f"{autos[0]}: auto would be {world_size} / {known}",
                fix="choose sizes whose product is the number of ranks" if autos else
                f"start {known} ranks, or choose sizes whose product is {world_size}; one may be auto",
            )  # fmt: skip
        layout = cls(**given, auto=autos[0] if autos else None)
        if layout.shard % layout.expert:
            raise ConfigError(
                f"expert {layout.expert} does not divide shard {layout.shard}",
                where=f"{where}.expert",
                why="the experts are split over ranks of `shard`, each of which has samples of its own",
                fix=f"choose a divisor of shard {layout.shard}, or another shard: what is a copy shares no experts",
            )
        return layout

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return prod(getattr(self, name) for name in DIMENSIONS)

    @property
    def data_parallel(self) -> int:
        """How many ranks have batches of their own; the ranks of a tensor, context or pipeline group share one."""
        return self.replicate * self.shard

    @property
    def neighbours(self) -> int:
        """How many consecutive ranks share a batch."""
        return self.context * self.tensor

    def data_rank(self, rank: int) -> int:
        """Which of these batches a rank has."""
        return rank // self.neighbours % self.data_parallel

    def dimensions(self) -> dict[str, int]:
        """The dimensions of the mesh with their sizes: those above 1, and `shard`.

        `shard` is always there: with 1 it shards nothing, but what makes every parameter a DTensor, reduces the
        gradients of copies and computes in other number formats is the same `fully_shard`.
        """
        sizes = {name: getattr(self, name) for name in DIMENSIONS}
        return {name: size for name, size in sizes.items() if size > 1 or name == "shard"}

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in DIMENSIONS}
        within = {"shard": f" (expert {self.expert})"} if self.expert > 1 else {}
        shown = [f"{name} {size}{within.get(name, '')}" for name, size in sizes.items() if size > 1]
        return " x ".join(shown) or "shard 1"

    def explained(self) -> str:
        """The sizes, with the reason for the one that was not given."""
        if self.auto is None:
            return str(self)
        others = [f"{name} {size}" for name, size in self.dimensions().items() if name != self.auto and size > 1]
        by = f" / ({' x '.join(others)})" if others else ""
        return f"{self}, with {self.auto}: auto = {self.world_size} ranks{by} = {getattr(self, self.auto)}"

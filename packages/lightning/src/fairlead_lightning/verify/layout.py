"""The layout of a job in a small world: each of its dimensions above 1 is 2, so that its kinds stay; torch-free.

What is right with two replicas need not be right with more (a hook that divides by two): copies and shards are tried
with three of them as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from fairlead.config_bases import StrategyConfigBase
from fairlead.errors import ConfigError
from fairlead.resolution import Resolution

_SMALL: Final = 2
_MORE: Final = 3
_FEW: Final = 4
"""A layout of no more ranks is verified as it is."""
_MOST: Final = 8
"""Processes that a second size may take."""
_COPIES: Final = ("replicate", "shard", "data_parallel")
_DIMENSIONS: Final = ("pipeline", "replicate", "shard", "data_parallel", "context", "tensor")
_PART_OF_OTHERS: Final = ("expert",)
"""Dimensions that lie in others, and add no ranks."""


@dataclass(frozen=True)
class Layout:
    """A layout as it is verified.

    Attributes:
        settings: What of the job is set for it.
        ranks: Processes.
        remarks: What was changed, and where it runs.
    """

    settings: dict[str, Any]
    ranks: int
    remarks: tuple[str, ...]


def layouts_of(resolution: Resolution, *, full: bool) -> list[Layout]:
    """The layouts to train, one after the other; on this machine's devices where there are enough, else on its CPUs.

    Raises:
        ConfigError: Nothing is split.
    """
    world = resolution.world_size
    if world == 1:
        raise ConfigError(
            "the job has one rank: nothing is split",
            where="trainer.devices",
            fix="verify a layout: --set trainer.devices=2 --set trainer.strategy=fsdp2",
        )
    strategy = resolution.strategy
    sizes = _sizes(strategy, world)
    if full or world <= _FEW:
        return [_layout(resolution, sizes, sizes, world)]
    small = {name: min(size, _SMALL) for name, size in sizes.items()}
    dimensions = any(_kind(name) in _DIMENSIONS for name in sizes)
    ranks = _SMALL
    copies_of_shards = "HYBRID" in str(getattr(strategy, "sharding_strategy", "")).upper()
    if dimensions:
        ranks = _ranks(small)
    elif copies_of_shards:
        ranks = _SMALL**2  # two of each
    found = [_layout(resolution, sizes, small, ranks)]
    more = {name: min(size, _MORE) if _kind(name) in _COPIES else small[name] for name, size in sizes.items()}
    divided = any(size > 1 and _kind(name) in _PART_OF_OTHERS for name, size in sizes.items())
    if dimensions and more != small and not divided and _ranks(more) <= _MOST:
        found.append(_layout(resolution, sizes, more, _ranks(more)))
    elif not dimensions and not copies_of_shards:
        found.append(_layout(resolution, sizes, more, _MORE))
    return found


def _ranks(sizes: dict[str, int]) -> int:
    return _product(size for name, size in sizes.items() if _kind(name) in _DIMENSIONS)


def _layout(resolution: Resolution, sizes: dict[str, int], small: dict[str, int], ranks: int) -> Layout:
    strategy = resolution.strategy
    remarks = []
    if ranks != resolution.world_size:
        parts = [f"{_kind(name)} {size} -> {small[name]}" for name, size in sizes.items() if size != small[name]]
        remarks.append(
            f"scaled down from {resolution.world_size} ranks ({', '.join(parts)}); --full verifies all of them"
        )
        if not parts:
            remarks[-1] = f"scaled down from {resolution.world_size} ranks; --full verifies all of them"
    device = resolution.device_type
    there = resolution.devices_found
    moved = device != "cpu" and there.count < ranks
    if moved:
        remarks.append(
            f"on CPUs over gloo: this machine has {there.count} of the {ranks} {device} devices that it takes"
        )
    settings: dict[str, Any] = {
        "trainer.accelerator": "cpu" if moved or device == "cpu" else resolution.accelerator.model_dump(mode="json"),
        "trainer.devices": ranks,
        "trainer.num_nodes": 1,
        "trainer.environment": "auto",
    }
    changes: dict[str, Any] = {
        name: small[name] for name, size in sizes.items() if size != small[name] and _set(strategy, name)
    }
    if moved and getattr(strategy, "process_group_backend", "auto") != "auto":
        changes["process_group_backend"] = "auto"
    if changes:
        given = strategy.model_dump(mode="json", exclude_defaults=True)
        settings["trainer.strategy"] = {**given, "name": strategy.name, **changes}
    if resolution.precision.name != "32-true":
        remarks.append(
            f"verified in 32-true, not in {resolution.value('precision')}: rounding would hide what is wrong"
        )
        settings["trainer.precision"] = "32-true"
    return Layout(settings, ranks, tuple(remarks))


def _sizes(strategy: StrategyConfigBase, ranks: int) -> dict[str, int]:
    """The sizes of a strategy's dimensions by field; `auto` is what the others leave of the ranks."""
    given = {name: getattr(strategy, name) for name in type(strategy).model_fields if _kind(name) is not None}
    sizes = {name: int(size) for name, size in given.items() if isinstance(size, int) and not isinstance(size, bool)}
    taken = _product(size for name, size in sizes.items() if _kind(name) in _DIMENSIONS)
    for name, size in given.items():
        if size == "auto" and _kind(name) in _DIMENSIONS:
            sizes[name] = max(1, ranks // taken)
            taken *= sizes[name]
    return sizes


def _set(strategy: StrategyConfigBase, name: str) -> bool:
    """Whether a size is a number in the config: `auto` is right in any world."""
    return isinstance(getattr(strategy, name), int)


def _kind(field: str) -> str | None:
    """`tensor` for `tensor`, `tensor_size` and `tensor_parallel_size`; None: it is no dimension."""
    name = field.removesuffix("_size")
    shorter = name.removesuffix("_parallel")
    return next((one for one in (name, shorter) if one in (*_DIMENSIONS, *_PART_OF_OTHERS)), None)


def _product(sizes: Any) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total

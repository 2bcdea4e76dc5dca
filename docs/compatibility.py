"""Every strategy with every choice of the other axes: run by a test, in need of hardware, or refused with a reason.

What is here is asked of the installed plugins, as `fairlead check` does it; `integration_tests/test_compatibility.py`
trains each cell that says `runs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

from docs.field_tables import table
from fairlead.checks import check_trainer
from fairlead.config import ResourcesConfig, TrainerConfig
from fairlead.findings import Finding
from fairlead.plugins import PluginManager

__all__ = ["AXES", "Cell", "cell", "cells", "choices", "markdown", "settings"]

AXES: Final = ("accelerator", "precision", "checkpoint_io", "clipping", "layer_sync", "accumulation")
"""What a strategy is combined with."""

_MACHINES: Final = ("cpu", "cuda", "xla", "mps")
"""The accelerators on which a pair is tried, until one takes it."""
_DEVICES: Final[Mapping[str, str]] = {"cpu": "cpu", "cuda": "h100"}
"""A device of each accelerator, for a machine that is not this one."""
_RANKS: Final[Mapping[str, int]] = {"single_device": 1, "single_xla": 1}


@dataclass(frozen=True)
class Cell:
    """One strategy with one choice.

    Attributes:
        strategy: The strategy's tag.
        axis: One of `AXES`.
        choice: A tag of that axis.
        accelerator: Where the two go together; None: nowhere.
        reason: Why they do not, as `check` says it.
        instead: What it advises.
    """

    strategy: str
    axis: str
    choice: str
    accelerator: str | None
    reason: str = ""
    instead: str = ""

    @property
    def state(self) -> Literal["runs", "hardware", "refused"]:
        """Whether a CPU test trains it, it needs a device that the tests lack, or `check` refuses it."""
        if self.accelerator is None:
            return "refused"
        return "runs" if self.accelerator == "cpu" else "hardware"


def choices(axis: str, plugins: PluginManager) -> list[str]:
    """The choices of an axis."""
    if axis == "clipping":
        return ["norm", "value"]
    if axis == "accumulation":
        return ["2"]
    if axis != "precision":
        return sorted(plugins.distinct(axis))
    # Here the presets are what people write; of several that say the same, the one that is shown.
    presets = [{**plugin.preset, "name": plugin.tag} for plugin in plugins.loaded(axis).values()]
    made = (plugins.get(axis, preset["name"]).config(**preset) for preset in presets)
    return sorted({plugins.label(config) for config in made})


def settings(strategy: str, axis: str, choice: str, plugins: PluginManager) -> dict[str, Any]:
    """The fields of a trainer that has the two."""
    plugin = plugins.get("strategy", strategy)
    fields: dict[str, Any] = {"strategy": {"name": strategy, **plugin.example}, "devices": _RANKS.get(strategy, 2)}
    if axis == "clipping":
        return {**fields, "gradient_clip_val": 0.5, "gradient_clip_algorithm": choice}
    if axis == "accumulation":
        return {**fields, "accumulate_grad_batches": int(choice)}
    return {**fields, axis: _configured(axis, choice, plugins)}


def _configured(axis: str, choice: str, plugins: PluginManager) -> Any:
    example = plugins.get(axis, choice).example
    return {"name": choice, **example} if example else choice


@cache
def cells(plugins: PluginManager) -> tuple[Cell, ...]:
    """All of them, strategy by strategy."""
    return tuple(
        cell(strategy, axis, choice, plugins)
        for strategy in choices("strategy", plugins)
        for axis in AXES
        for choice in choices(axis, plugins)
    )


def cell(strategy: str, axis: str, choice: str, plugins: PluginManager) -> Cell:
    """What `check` says of the two."""
    wanted = settings(strategy, axis, choice, plugins)
    refusals = []
    for accelerator in (choice,) if axis == "accelerator" else _MACHINES:
        errors = list(_errors({**wanted, "accelerator": accelerator}, accelerator, plugins))
        if not errors:
            return Cell(strategy, axis, choice, accelerator)
        refusals.append(errors)
    # Where the strategy itself runs, its reason is the one that helps.
    about = [error for errors in refusals for error in errors if choice in error.what or axis in error.what]
    told = about[0] if about else refusals[0][0]
    return Cell(strategy, axis, choice, None, told.why or told.what, told.fix or "")


def _errors(fields: dict[str, Any], accelerator: str, plugins: PluginManager) -> Iterator[Finding]:
    trainer = TrainerConfig.model_validate(fields, context={"plugins": plugins})
    device = _DEVICES.get(accelerator)
    profile = ResourcesConfig(device=device, devices_per_node=fields["devices"]) if device else None
    _, findings = check_trainer(trainer, environ={}, plugins=plugins, profile=profile)
    missing = ("plugin-missing", "hardware-missing")  # of this machine, and not of the pair
    yield from (one for one in findings if one.severity == "error" and one.code not in missing)


def markdown(plugins: PluginManager) -> str:
    """A table for each axis, with the reasons of what is refused below it."""
    parts = []
    found = cells(plugins)
    for axis in AXES:
        columns = choices(axis, plugins)
        by_place = {(one.strategy, one.choice): one for one in found if one.axis == axis}
        rows, reasons = [], dict[tuple[str, str], list[str]]()
        for strategy in choices("strategy", plugins):
            row = [f"`{strategy}`"]
            for choice in columns:
                one = by_place[strategy, choice]
                row.append({"runs": "yes", "hardware": f"on {one.accelerator}", "refused": "no"}[one.state])
                if one.state == "refused":
                    reasons.setdefault((one.reason, one.instead), []).append(f"`{strategy}` and `{choice}`")
            rows.append(tuple(row))
        said = [
            f"- {', '.join(pairs)}: {reason}.{f' Instead: {instead}.' if instead else ''}"
            for (reason, instead), pairs in reasons.items()
        ]
        head = ("strategy", *(f"`{choice}`" for choice in columns))
        parts.append("\n".join([f"## {axis}", "", table(head, rows), *(["", *said] if said else [])]))
    return "\n\n".join(parts)

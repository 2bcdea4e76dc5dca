"""How fast devices and software stacks are: what is fitted to published runs, or measured on a cluster of one's own.

`calibration.json` beside this file ships; `python benchmarks/plan/fit.py` writes it. Each number in it has a physical
meaning and a value known before (`prior`), from which published runs move it as far as they speak for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Final

from fairlead.errors import ConfigError, did_you_mean
from fairlead_planning.collectives import Measured
from fairlead_planning.devices import Device

REFERENCE_W: Final = {"ampere": 400.0, "hopper": 700.0, "blackwell": 1000.0, "blackwell ultra": 1100.0}
"""The power at which `matmul` of a family is given."""


@dataclass(frozen=True)
class Stack:
    """The kernels that a job uses."""

    name: str
    attention: float
    """How fast its attention is, relative to the best of the device's family."""
    traffic: float
    """Of the memory traffic of eager elementwise kernels, what fusion leaves."""
    launch_us: float
    """Host time for each kernel of the eager trace."""
    cast: float
    """Of the traffic of separate casts to 8 and 4 bits, what fusion leaves."""
    overlap_data: float
    exposed_tensor: float
    exposed_context: float
    exposed_expert: float
    exposed_pipeline: float
    dispatch_us: float
    """Host time for each mixture of experts, forward and backward: sizes of what is sent, permutations."""
    step_ms: float
    """Host time of each optimizer step that nothing hides: the optimizer's launches, norms, the loop."""
    uneven_context: float
    """1: ranks of `context` have consecutive positions, of which the last have most to attend to; 0: equal work."""
    gradient_bytes: float
    """Traffic for each parameter when a further micro-batch's gradients are added."""
    reduce_each: bool
    """Gradients are reduced in each micro-batch, and not in the last only."""


@dataclass(frozen=True)
class Calibration:
    """Fractions of peaks that are reached, by family of devices, and stacks."""

    numbers: Mapping[str, float]
    """By dotted names, as `matmul.hopper.bfloat16`."""
    communication: Measured = field(default_factory=dict)

    def __getattr__(self, name: str) -> float:
        if name in ("depth", "wave", "kernel_us", "hop_us", "contention", "jitter", "host_gb_s", "power", "grouped"):
            return self.numbers[name]
        raise AttributeError(name)

    def _of(self, name: str, family: str, dtype: str | None = None) -> float:
        """The number of a family, or of the nearest one that has it."""
        tail = f".{dtype}" if dtype else ""
        for one in (family, *_LIKE.get(family, ())):
            if (value := self.numbers.get(f"{name}.{one}{tail}")) is not None:
                return value
        return self.numbers[f"{name}.other"]

    def fraction(self, kind: str, dtype: str, device: Device, stack: Stack, *, backward: bool) -> float:
        """Which part of a device's peak large kernels of that kind reach."""
        if kind == "attention":
            reached = self._of("attention", device.family) * stack.attention
            return reached * self.numbers["attention.backward"] if backward else reached
        reached = self._of("matmul", device.family, _narrow(dtype))
        base = REFERENCE_W.get(device.family)
        return reached if base is None else reached * (device.power_w / base) ** self.power

    def memory_fraction(self, device: Device) -> float:
        """Which part of its memory bandwidth is reached."""
        return self._of("memory", device.family)

    def stack(self, name: str) -> Stack:
        """The stack of that name.

        Raises:
            ConfigError: There is none.
        """
        known = sorted({key.split(".")[1] for key in self.numbers if key.startswith("stack.")})
        if name not in known:
            near = did_you_mean(name, known)
            raise ConfigError(
                f"unknown software stack {name!r}" + (f"; did you mean {near!r}?" if near else ""),
                fix=f"choose one of {', '.join(known)}",
            )
        fields = {one: self.numbers[f"stack.{name}.{one}"] for one in Stack.__dataclass_fields__ if one != "name"}
        return Stack(name, **{**fields, "reduce_each": bool(fields["reduce_each"])})  # type: ignore[arg-type]


_LIKE: Final = {
    "blackwell ultra": ("blackwell", "hopper"),
    "blackwell": ("hopper",),
    "ada": ("ampere",),
    "cdna4": ("cdna3",),
}


def _narrow(dtype: str) -> str:
    if dtype.startswith("float8"):
        return "float8"
    return dtype if dtype in ("float4", "float32") else "bfloat16"


@cache
def shipped() -> Calibration:
    """The calibration that the package ships."""
    text = files("fairlead_planning").joinpath("calibration.json").read_text(encoding="utf-8")
    return Calibration({name: float(entry["value"]) for name, entry in json.loads(text)["numbers"].items()})

"""How fast devices and software stacks are: what is fitted to published runs, or measured on a cluster of one's own.

`calibration.json` beside this file ships; `python benchmarks/plan/fit.py` writes it. Each number in it has a physical
meaning and a value known before (`prior`), from which published runs move it as far as they speak for it.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fairlead.errors import ConfigError, did_you_mean
from fairlead_planning.collectives import Measured, measured_from
from fairlead_planning.devices import Device, device_facts

Array = npt.NDArray[np.float64]

REFERENCE_W: Final = {"ampere": 400.0, "hopper": 700.0, "blackwell": 1000.0, "blackwell ultra": 1100.0}
"""The power at which `matmul` of a family is given."""


@dataclass(frozen=True)
class Stack:
    """The kernels that a job uses."""

    name: str
    matmul: float
    """How fast its products are, relative to what the device's family reaches with recent libraries."""
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
    once: bool
    """Tokens go once to each domain and rank where they have experts, and not once to each expert."""
    reduce_each: bool
    """Gradients are reduced in each micro-batch, and not in the last only."""


@dataclass(frozen=True)
class Calibration:
    """Fractions of peaks that are reached, by family of devices, and stacks."""

    numbers: Mapping[str, float]
    """By dotted names, as `matmul.hopper.bfloat16`."""
    communication: Measured = field(default_factory=dict)

    def __getattr__(self, name: str) -> float:
        if name in (
            "depth",
            "wave",
            "kernel_us",
            "hop_us",
            "contention",
            "jitter",
            "host_gb_s",
            "power",
            "grouped",
            "all_to_all",
        ):
            return self.numbers[name]
        raise AttributeError(name)

    def _of(self, name: str, device: Device, dtype: str | None = None) -> float:
        """The number of a device's family, or of the nearest one that has it."""
        tail = f".{dtype}" if dtype else ""
        for one in (device.family, *_LIKE.get(device.family, ())):
            if (value := self.numbers.get(f"{name}.{one}{tail}")) is not None:
                return value
        return self.numbers[f"{name}.other"]

    def fraction(self, kind: str, dtype: str, device: Device, stack: Stack, *, backward: bool) -> float:
        """Which part of a device's peak large kernels of that kind reach."""
        if kind == "attention":
            measured = self.numbers.get(f"measured attention.{'backward' if backward else 'forward'}")
            if measured is not None:
                return measured
            reached = self._of("attention", device) * stack.attention
            return reached * self.numbers["attention.backward"] if backward else reached
        dtype = _narrow(dtype)
        if (measured := self.numbers.get(f"measured matmul.{dtype}")) is not None:
            return measured
        base = REFERENCE_W.get(device.family)
        reached = self._of("matmul", device, dtype) * stack.matmul
        return reached if base is None else reached * (device.power_w / base) ** self.power

    def memory_fraction(self, device: Device) -> float:
        """Which part of its memory bandwidth is reached."""
        measured = self.numbers.get("measured memory")
        return self._of("memory", device) if measured is None else measured

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
        flags = {one: bool(fields[one]) for one in ("reduce_each", "once")}
        return Stack(name, **{**fields, **flags})  # type: ignore[arg-type]


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


def from_file(path: Path, device: Device, base: Calibration | None = None) -> Calibration:
    """The calibration that `fairlead bench gemm` and `bench comm` wrote, with the shipped numbers for what it lacks.

    Runs that `fairlead report --record` added make all kernels faster or slower, by the median of their compute.

    Args:
        path: A JSON object; `device` is the name of what was measured.
        device: What is planned for.
        base: Where numbers come from that were not measured; the shipped ones by default.

    Raises:
        ConfigError: The file cannot be read, or was measured on another device.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        measured_on = device_facts(str(found["device"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no calibration",
            why=f"{type(error).__name__}: {error}",
            fix="write one on the cluster: fairlead bench gemm --calibration FILE",
        ) from error
    if measured_on.name != device.name:
        raise ConfigError(
            f"{path} was measured on {measured_on.name}, and the plan is for {device.name}",
            fix=f"measure on a {device.name}: fairlead bench gemm --calibration FILE; or plan without the file",
        )
    base = shipped() if base is None else base
    numbers = dict(base.numbers)
    numbers |= _products(found.get("matmul", ()), device, base)
    for name in ("forward", "backward"):
        rates = [row["tflops"] for row in found.get("attention", ()) if row.get("pass", "forward") == name]
        if rates:
            numbers[f"measured attention.{name}"] = max(rates) / device.peak_of("bfloat16")
    if rows := found.get("memory"):
        numbers["measured memory"] = max(row["gb_s"] for row in rows) / device.bandwidth_gb_s
    if launch := found.get("launch_us"):
        for name in ("eager", "triton"):
            numbers[f"stack.{name}.launch_us"] = float(launch)
    if rates := [float(row["rates"]) for row in found.get("runs", ()) if row.get("rates")]:
        faster = numbers["measured rates"] = statistics.median(rates)
        for name in numbers:
            kind = name.removeprefix("measured ").partition(".")[0]
            if kind in ("matmul", "attention", "memory") and name != "attention.backward":
                numbers[name] *= faster
    communication = measured_from(found["communication"]) if found.get("communication") else base.communication
    return Calibration(numbers, communication)


def _products(rows: Iterable[Mapping[str, Any]], device: Device, base: Calibration) -> dict[str, float]:
    """The rates that large products reach, and at which size they reach half of it, from single products."""
    by_dtype: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["dtype"] != "tf32":
            by_dtype.setdefault(_narrow(row["dtype"]), []).append(row)
    found: dict[str, float] = {}
    for dtype, mine in by_dtype.items():
        shapes = np.array([(1, row["m"], row["n"], row["k"]) for row in mine], dtype=float).T
        reached = np.array([row["tflops"] for row in mine]) / device.peak_of(dtype)
        sizes = [(base.depth, base.wave)]
        if dtype == "bfloat16" and len(mine) >= 6:  # enough to see how it grows
            sizes = list(itertools.product(np.geomspace(20, 2000, 25), np.geomspace(0.02, 1.5, 20)))
        best: tuple[float, float, float, float] | None = None
        for depth, wave in sizes:
            large = np.log(reached / filled(*shapes, units=device.units, depth=float(depth), wave=float(wave)))
            middle = float(np.median(large))
            wrong = float(np.abs(large - middle).mean())
            if best is None or wrong < best[0]:
                best = wrong, middle, float(depth), float(wave)
        assert best is not None
        found[f"measured matmul.{dtype}"] = float(np.exp(best[1]))
        if dtype == "bfloat16":
            found |= {"depth": best[2], "wave": best[3]}
    return found


def filled(batch: Array, m: Array, n: Array, k: Array, *, units: int, depth: float, wave: float) -> Array:
    """Which part of the rate of large products one reaches: its sum is short, or its tiles fill no wave."""
    tiles = batch * np.ceil(np.maximum(m, 1) / 128) * np.ceil(np.maximum(n, 1) / 128)
    waves = tiles / units
    part: Array = np.maximum(k / (k + depth) * waves / (waves + wave), 1e-6)
    return part

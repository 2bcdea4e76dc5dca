"""Where the trials of a sweep on this machine compute: their GPUs, and their share of the processors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from fairlead import PluginManager
from fairlead.facts import Devices, Setting
from fairlead.testing import FakeEntryPoint, minimal_resolution, stand_ins
from fairlead_launch.submission.local import _slots

PLUGINS = PluginManager([FakeEntryPoint(name, target) for name, target in stand_ins().items()])
GPUS = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("gpus", "each", "asked", "left", "environ", "slots"),
    [
        (4, 1, None, 9, {}, [{GPUS: "0"}, {GPUS: "1"}, {GPUS: "2"}, {GPUS: "3"}]),
        (4, 2, None, 9, {}, [{GPUS: "0,1"}, {GPUS: "2,3"}]),
        (4, 4, None, 9, {}, [{GPUS: "0,1,2,3"}]),
        (2, 1, 3, 9, {}, [{GPUS: "0"}, {GPUS: "1"}, {GPUS: "0"}]),  # asked for: two share one
        (4, 1, None, 2, {}, [{GPUS: "0"}, {GPUS: "1"}]),
        (2, 1, None, 9, {GPUS: "5,7"}, [{GPUS: "5"}, {GPUS: "7"}]),
        (2, 1, None, 9, {"HIP_VISIBLE_DEVICES": "3,2"}, [{"HIP_VISIBLE_DEVICES": "3"}, {"HIP_VISIBLE_DEVICES": "2"}]),
        (0, 1, None, 9, {}, [{}]),
        (0, 1, 3, 9, {}, [{}, {}, {}]),
        (0, 1, 3, 0, {}, [{}]),
    ],
)
def test_each_slot_has_its_devices(
    gpus: int, each: int, asked: int | None, left: int, environ: Mapping[str, str], slots: list[Mapping[str, str]]
) -> None:
    found = minimal_resolution(PLUGINS)
    kind = "cuda" if gpus else "cpu"
    settings = {**found.settings, "threads": Setting(8, "OMP_NUM_THREADS")}
    resolution = dataclasses.replace(
        found, device_type=kind, devices=each, devices_found=Devices(gpus, "test"), settings=settings
    )
    assert _slots(resolution, asked, left, environ) == slots


@pytest.mark.parametrize(
    ("reason", "asked", "threads"),
    [("8 CPUs", 3, "2"), ("8 CPUs", 9, "1"), ("8 CPUs", 1, None), ("trainer.threads", 3, None)],
)
def test_trials_share_the_processors(reason: str, asked: int, threads: str | None) -> None:
    found = minimal_resolution(PLUGINS)
    resolution = dataclasses.replace(found, settings={**found.settings, "threads": Setting(8, reason)})
    assert {slot.get("OMP_NUM_THREADS") for slot in _slots(resolution, asked, 99, {})} == {threads}

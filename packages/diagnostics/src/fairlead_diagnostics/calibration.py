"""The calibration file: what was measured of a cluster, which `fairlead plan --calibration` reads.

`fairlead bench gemm`, `bench comm` and `report --record` each add their part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fairlead.errors import ConfigError, RunDirectoryError
from fairlead_runs.commit import atomic_write
from fairlead_runs.device_models import find_device

_KEYS: Final = {"communication": ("op", "ranks", "nodes", "bytes"), "runs": ("run", "start")}
"""By what the rows of a part differ, where measurements add up; the other parts are replaced."""


def calibration_file(given: str | None, cwd: Path, option: str = "--calibration") -> Path | None:
    """Where the figures go, looked at before anything is measured; None: nowhere."""
    if given is None:
        return None
    file = cwd / given
    if not file.parent.is_dir():
        raise ConfigError(f"there is no folder {file.parent}", where=option, fix="make it, or name another")
    if file.exists():
        _read(file)
    return file


def add_to_calibration(file: Path, found: Mapping[str, Any]) -> None:
    """Puts what was measured into a calibration; of other parts, ranks and sizes it keeps what it has."""
    device = device_name(str(found["device"]))
    before = _read(file) if file.exists() else {}
    if before.get("device", device) != device:
        raise ConfigError(
            f"{file.name} is a calibration of {before['device']}, and this device is {device}",
            where="--calibration",
            fix="name another file: each kind of device has its own",
        )
    merged = {**before, **found, "device": device}
    if before:
        merged["source"] = "; ".join(dict.fromkeys([*str(before.get("source", "")).split("; "), found["source"]]))
    for part, keys in _KEYS.items():
        rows = {tuple(row[key] for key in keys): row for row in (*before.get(part, ()), *found.get(part, ()))}
        merged[part] = list(rows.values())
    atomic_write(file, (json.dumps(merged, indent=1) + "\n").encode(), error=RunDirectoryError)


def device_name(name: str) -> str:
    """As a job file's `resources.device` has it, `h100`; the driver's name if it is not known."""
    model = find_device(name)
    return model.name if model is not None else name


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} is no calibration", where="--calibration", why=str(error), fix="name another file"
        ) from error
    if not isinstance(found, dict) or not {"device", "source"} <= found.keys():
        raise ConfigError(
            f"{file} is no calibration",
            where="--calibration",
            why="it has no device and source, as `fairlead bench gemm --calibration` writes them",
            fix="name another file",
        )
    return found

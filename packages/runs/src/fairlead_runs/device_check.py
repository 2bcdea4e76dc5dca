"""Is `resources.device` a device that is known, and that something here drives?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fairlead.findings import CheckResult, Finding
from fairlead.jobs import LoadedJob
from fairlead.plugins import default_plugins
from fairlead.resolution import Resolution
from fairlead_runs.device_models import find_device, nearest_devices


def check_device(loaded: LoadedJob, resolution: Resolution, environ: Mapping[str, str], cwd: Path) -> CheckResult:
    """A name that is not known is an error, unless its memory is given, as for a scheduler's own name of a GPU."""
    resources = loaded.job.resources if loaded.job is not None else None
    name = resources.device if resources is not None else None
    if name is None or name.lower() in default_plugins().names("accelerator"):
        return CheckResult()
    model = find_device(name)
    where = "resources.device"
    if model is None:
        near = nearest_devices(name.lower())
        meant = f"did you mean {near[0]!r}{_others(near[1:])}?" if near else "see `fairlead capabilities --devices`"
        if resources is not None and resources.memory_gib is not None:
            finding = Finding(
                "warning",
                "device-unknown",
                f"the device {name!r} is not known, and is taken for a GPU that torch drives as cuda",
                where=where,
                why="nothing is known of what it computes in",
                fix=meant,
            )
        else:
            finding = Finding(
                "error",
                "device-unknown",
                f"the device {name!r} is not known",
                where=where,
                why="nothing is known of its memory, and of what it computes in",
                fix=f"{meant}\nA GPU that your scheduler calls so: add its memory, as memory_gib: 80",
            )
    elif model.vendor.accelerator is None:
        finding = Finding(
            "error",
            "device-not-driven",
            f"no accelerator of Fairlead drives a {name}",
            where=where,
            why=f"it takes {model.vendor.source}",
            fix="a GPU or TPU; `fairlead capabilities --devices` lists those that are known",
        )
    else:
        return CheckResult()
    return CheckResult((finding,))


def _others(names: list[str]) -> str:
    return f" (or {', '.join(map(repr, names))})" if names else ""

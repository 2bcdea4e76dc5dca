"""What the scripts of SLURM and LSF have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairlead.config_bases import SubmitterConfigBase
from fairlead_launch.submission.batch import BatchSubmitterConfig
from fairlead_launch.submission.interface import Request
from fairlead_launch.submission.templates import Raw, words


def own_options(own: Mapping[str, object], config: SubmitterConfigBase) -> dict[str, object]:
    """The options of a job, those of `extra` in place of Fairlead's own; null and false leave one out."""
    dashes = "-" if any(name.startswith("-") for name in own) else ""
    extra = {f"{dashes}{name.lstrip('-')}".replace("_", "-"): value for name, value in config.extra.items()}
    merged = {**own, **extra}
    return {name: value for name, value in merged.items() if value is not None and value is not False}


def batch_values(config: BatchSubmitterConfig, request: Request) -> dict[str, Any]:
    """What every template of a batch script may use."""
    return {
        "request": request,
        "submit": config,
        "modules": list(config.modules),
        "variables": dict(request.variables),
        "setup": list(config.setup),
        "sweep": request.sweep,
    }


def job_file_word(request: Request) -> Raw:
    """The job file as a word of the shell; of a sweep that of the member `$INDEX`."""
    if not request.sweep:
        return words([request.job_files[0]])
    return Raw(f'{words([request.folder / "members"])}/"$INDEX".yaml')

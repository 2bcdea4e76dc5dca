"""What SLURM and LSF have in common: the settings of a batch job, and what its script is made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from fairlead.config_bases import ConfigModel, SubmitterConfigBase
from fairlead_launch.submission.interface import Request
from fairlead_launch.submission.templates import Raw, words

_ARRAY: Final = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*")


def _indices(text: str) -> str:
    if not _ARRAY.fullmatch(text):
        raise ValueError(f"{text!r} is no array; write its indices, as 0-15, 0-30:2 or 1,4,7; max_parallel is apart")
    return text


class ContainerConfig(ConfigModel):
    """A container in which each rank runs; the batch script itself runs outside of it."""

    image: str = Field(min_length=1)
    """The image: a file such as `train.sif` or `train.sqsh`, or an address such as `docker://nvcr.io#nvidia/pytorch`."""
    runtime: Literal["apptainer", "pyxis"] = "apptainer"
    """`apptainer` runs `apptainer exec`; `pyxis` is the plugin of SLURM that adds `srun --container-image`."""
    mounts: list[str] = Field(default_factory=list)
    """Folders to mount besides the working directory, the run directory and the code: `/data` or `/data:/mnt`."""
    extra: list[str] = Field(default_factory=list)
    """Further words for `apptainer exec` or for `srun`: `["--writable-tmpfs"]`."""

    def all_mounts(self, request: Request) -> list[str]:
        """What the ranks need: the working directory, the run directories, the copy of the code, and `mounts`."""
        folders = [str(request.cwd), *sorted({str(run.parent) for run in request.runs}), str(request.folder)]
        return list(dict.fromkeys([*folders, *self.mounts]))

    def words(self, request: Request) -> list[str]:
        """What stands in front of the command of a rank; nothing where srun starts the container."""
        if self.runtime == "pyxis":
            return []
        nvidia = ["--nv"] if request.gpus else []
        mounts = [word for mount in self.all_mounts(request) for word in ("--bind", mount)]
        return ["apptainer", "exec", *nvidia, *mounts, "--pwd", str(request.cwd), *self.extra, self.image]


class BatchSubmitterConfig(SubmitterConfigBase):
    """A job of a batch scheduler."""

    account: str | None = None
    """The account or project that is charged."""
    partition: str | None = None
    """The partition of SLURM, the queue of LSF."""
    qos: str | None = None
    """The quality of service of SLURM, the service class of LSF."""
    constraint: str | None = None
    """What nodes must have: `"a100&ib"`; LSF's resource requirement (`-R`)."""
    dependency: str | None = None
    """After which other jobs it starts: `afterok:4711` in SLURM, `done(4711)` in LSF."""
    array: Annotated[str, AfterValidator(_indices)] | None = None
    """Indices of an array, `0-15`: each task is a run of its own, and finds its index in SLURM_ARRAY_TASK_ID or
    LSB_JOBINDEX. For a sweep over settings there is `fairlead submit --sweep`."""
    max_parallel: int | None = Field(default=None, ge=1)
    """How many tasks of an array, or members of a sweep, may run at once."""
    python: str | None = Field(default=None, min_length=1)
    """The Python of the environment in which the job runs, where it is another than the one that submits:
    `/envs/train/bin/python`, or `python` where `setup` or `modules` put one on the PATH. Default null: the one that
    submits; in a container its `python`."""
    tasks: Literal["rank", "node"] = "rank"
    """`rank`: the scheduler starts one task per rank; `node`: one task per node, which starts the ranks of its node."""
    gpus: Literal["node", "task", "none"] = "node"
    """How devices are requested: all of a node for all of its tasks, one for each task, or not at all, for a scheduler
    without devices."""
    modules: list[str] = Field(default_factory=list)
    """Modules to load before the ranks: `[cuda/12.4, gcc]`; everything that was loaded before is unloaded."""
    container: ContainerConfig | None = None
    """A container for the ranks. Default null: none."""
    warn: int | None = Field(default=None, ge=10, le=65535)
    """Seconds before the time limit at which the ranks are warned: a step and a save have to fit into them. Default
    null: three times the longest save in the run's history and a minute, but not less than 120."""


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

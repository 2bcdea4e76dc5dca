"""What SLURM and LSF have in common: the settings of a batch job, and what its script is made of."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from pydantic import Field

from fairlead.config_bases import ConfigModel, SubmitterConfigBase
from fairlead.errors import ConfigError, RunFailedError
from fairlead_launch.submission.interface import NotAnsweredError, Request, Submitter
from fairlead_runs.programs import Attempt, ask, attempt, find

TIMEOUT_S: Final = 60.0
"""Seconds that a command of the scheduler may take: a busy controller lets it wait."""
REFUSED: Final = (
    "change what it names in the job's `submit` (account, partition or queue, time, options) or `resources`; "
    "`fairlead submit --dry-run` shows the script"
)
"""What to do where a scheduler refuses a job, in its own words."""


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
    max_parallel: int | None = Field(default=None, ge=1)
    """How many members of a sweep may run at once."""
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


class BatchSubmitter(Submitter):
    """Hands a script to a batch scheduler by one command, and ends a job by another."""

    config: BatchSubmitterConfig
    submits: ClassVar[str]
    """The command that takes a script."""
    asks: ClassVar[str]
    """How a person asks which jobs there are."""
    cancels: ClassVar[str]
    """The command that ends a job."""

    def hand_over(self, script: Path, *options: str, shell: Sequence[str] = ()) -> Attempt:
        """Runs the command that submits, with its options and the script; `shell` are the words in front of it."""
        program = find(self.submits, self.environ)
        if program is None:
            raise RunFailedError(
                f"the job is not submitted: {self.submits} is not on the PATH", fix="submit from a login node"
            )
        done = attempt([*shell, program, *options, str(script)], TIMEOUT_S, self.environ)
        if done.code is None:
            raise NotAnsweredError(
                f"{self.submits} did not answer within {TIMEOUT_S:.0f} s: the job may be queued or not",
                where=str(script),
                fix=f"see with {self.asks} whether the job is there before you resubmit it",
            )
        if done.code != 0:
            raise self.refused(script, done)
        return done

    def refused(self, script: Path, done: Attempt) -> RunFailedError:
        """The scheduler did not take the job."""
        what = f"the job is not submitted: {self.submits} refused it"
        return RunFailedError(what, where=str(script), why=done.message, fix=REFUSED)

    def cancel(self, job: str) -> None:
        """Ends the job: the ranks save, and are not restarted."""
        _, problem = self.ask(self.cancels, job)
        if problem:
            raise RunFailedError(f"job {job} is not cancelled", why=problem)

    def ask(self, *words: str, **variables: str) -> tuple[str, str]:
        """What a command of the scheduler prints, with these further variables, and why it does not."""
        return ask(words, time.monotonic() + TIMEOUT_S, {**self.environ, **variables})

    def array(self, request: Request) -> str | None:
        """The indices of a sweep's members, with how many of them may run at once; None: it is no sweep."""
        if not request.indices:
            return None
        indices = f"{request.indices[0]}-{request.indices[-1]}"
        return f"{indices}%{request.max_parallel}" if request.max_parallel else indices

    def inside(self, request: Request) -> list[str]:
        """What stands in front of the command of a rank, for its container."""
        return self.config.container.words(request) if self.config.container is not None else []

    def job_file(self, request: Request) -> Raw:
        """The job file as a word of the shell; of a sweep that of the member `$INDEX`."""
        if not request.indices:
            return words([request.job_files[0]])
        return Raw(f'{words([request.folder / "members"])}/"$INDEX".yaml')

    def script(self, template: str, request: Request, own: Mapping[str, object], **values: object) -> str:
        """Fills a template of this package, or the job's own.

        Args:
            template: Its name.
            request: The submission.
            own: The options of the scheduler, by their names; None and False leave one out. Those of `submit.extra`
                replace them.
            values: What this template may use besides.
        """
        dashes = "-" if any(name.startswith("-") for name in own) else ""
        extra = {f"{dashes}{name.lstrip('-')}".replace("_", "-"): value for name, value in self.config.extra.items()}
        chosen = {name: value for name, value in {**own, **extra}.items() if value is not None and value is not False}
        common = {
            "request": request,
            "submit": self.config,
            "modules": list(self.config.modules),
            "variables": dict(request.variables),
            "setup": list(self.config.setup),
            "sweep": bool(request.indices),
            "options": [option(name, value) for name, value in chosen.items()],
        }
        return render_template(template, {**common, **values}, own=self.config.template, cwd=request.cwd)


class Raw(str):
    """Text that goes into a script as it is: shell that is meant to be shell."""

    __slots__ = ()


def words(values: Iterable[object]) -> Raw:
    """A command line, each of its words quoted."""
    return Raw(shlex.join(str(value) for value in values))


def option(name: str, value: object = True) -> Raw:
    """One option of a scheduler's line: `--nodes=2`, `--exclusive` where it is true, `-q 'my queue'` with one dash.

    Raises:
        ConfigError: A line break, which would end the line and begin one of the value's own.
    """
    dashed = name if name.startswith("-") else f"--{name}"
    if value is True and dashed.isprintable():
        return Raw(dashed)
    text = str(value)
    if any(ord(char) < 32 for char in f"{name}{text}") or not dashed.isprintable() or " " in dashed:
        raise ConfigError(
            f"the value of {name!r} has a line break, or another character that no option of a script can hold",
            where="submit",
            why=repr(text),
            fix="write it on one line",
        )
    return Raw(f"{dashed}{'=' if dashed.startswith('--') else ' '}{shlex.quote(text)}")


def render_template(name: str, values: Mapping[str, Any], *, own: str | None = None, cwd: Path | None = None) -> str:
    """A template of this package, or the user's `own`, with these values.

    `{{ x }}` is quoted for the shell, unless it is `Raw`; a list is a list of words. A template writes `{{ x | raw }}`
    for what is shell already.

    Raises:
        ConfigError: The user's template is not there, is no template, or asks for what there is not.
    """
    import jinja2  # a plugin is loaded without it

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        finalize=_quoted,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(raw=Raw, words=words)
    path = Path(__file__).with_name("templates") / name if own is None else (cwd or Path.cwd()) / own
    try:
        return environment.from_string(path.read_text(encoding="utf-8")).render(values)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the template cannot be read", where=f"submit.template: {path}", why=str(error)) from error
    except jinja2.TemplateError as error:
        line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ConfigError(
            "the template cannot be filled",
            where=f"submit.template: {path}",
            why=f"{line}{error.message}",
            fix=f"it may use: {', '.join(sorted(values))}",
        ) from error


def _quoted(value: object) -> object:
    from jinja2 import Undefined

    if isinstance(value, Raw | Undefined):
        return value
    if isinstance(value, list | tuple):
        return words(value)
    return shlex.quote(str(value))

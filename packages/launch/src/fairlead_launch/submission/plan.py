"""A submission from the job to the scheduler: checked, decided, written, handed over, recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fairlead import yaml
from fairlead.checks import CheckedJob, check_job
from fairlead.config import JobConfig
from fairlead.config_bases import SubmitterConfigBase
from fairlead.errors import ConfigError, RunDirectoryError
from fairlead.findings import Finding, errors_in
from fairlead.interpolation import escape
from fairlead.jobs import LoadedJob, load_config, load_job
from fairlead.overrides import parse_override
from fairlead.own_checks import check_user_code
from fairlead.plugins import PluginManager
from fairlead_launch.submission.batch import BatchSubmitterConfig
from fairlead_launch.submission.interface import NotAnsweredError, Request, Submitter, build_submitter
from fairlead_launch.submission.requests import (
    command,
    frozen,
    hardware,
    members,
    variables,
    warning_lead,
    with_requeuer,
)
from fairlead_launch.submission.snapshot import Sources, find_sources, moved, take_snapshot
from fairlead_runs.exclusion import excluded_nodes
from fairlead_runs.fingerprints import leaves
from fairlead_runs.history import read_history
from fairlead_runs.naming import render_name, safe_name
from fairlead_runs.redaction import redact
from fairlead_runs.states import HISTORY_FILE
from fairlead_runs.submitted import SUBMISSIONS, VARIABLE, Record, next_number, queued_submission


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What cannot be written to the folder of a submission is a `RunDirectoryError`."""
    try:
        yield
    except OSError as error:
        where = str(error.filename or folder)
        raise RunDirectoryError("the submission cannot be written", where=where, why=error.strerror) from error


class WrongJobError(ConfigError):
    """The check of the job has found errors; `findings` are all that it says, errors first."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        wrong = errors_in(findings)
        self.findings = list(dict.fromkeys([*wrong, *findings]))
        super().__init__(
            f"the job is not submitted: {len(wrong)} of its settings {'is' if len(wrong) == 1 else 'are'} wrong",
            why="\n".join(str(finding) for finding in errors_in(self.findings)),
        )


@dataclass(frozen=True)
class Plan:
    """What is to be submitted; nothing is written yet.

    Args:
        submitter: The scheduler.
        home: The directory whose `submissions/` gets the script: the run's, or one that a sweep's members share.
        request: What the templates see.
        sweep: The overrides of each member of a sweep.
        sources: The files that are copied; None: none are.
        files: What the scheduler gets, by name.
        findings: The warnings of the check.
        environ: The environment variables of this process.
        plugins: Finds what the jobs name.
    """

    submitter: Submitter
    home: Path
    request: Request
    sweep: Sequence[tuple[str, ...]]
    sources: Sources | None
    files: Mapping[str, str]
    findings: Sequence[Finding]
    environ: Mapping[str, str]
    plugins: PluginManager

    def submit(self) -> list[Record]:
        """Writes the submission, hands it over, and records it in each run; where it is refused nothing is left.

        Raises:
            FairleadError: It cannot be written, the copy of the code is incomplete, or the scheduler refused.
        """
        request = self.request
        self._not_twice()
        with writing(request.folder):
            request.folder.mkdir(parents=True)
        try:
            scripts = self._write()
            job = self.submitter.submit(request, scripts)
        except NotAnsweredError:
            raise  # it may be queued, and needs its files
        except Exception:
            shutil.rmtree(request.folder, ignore_errors=True)
            raise
        return self._record(job)

    def _not_twice(self) -> None:
        """Two jobs of one run would stop each other; one that waits for the other needs a `dependency`."""
        before = queued_submission(self.request.runs[0])
        if before is None or getattr(self.submitter.config, "dependency", None):
            return
        phase = build_submitter(before.submit, self.environ, self.plugins).state(before.id).phase
        if phase in ("queued", "running"):
            raise ConfigError(
                f"the run is submitted already: job {before.id} is {phase}",
                where=before.run,
                fix="cancel that job, or set another run.name; or submit.dependency, for one that waits for it",
            )

    def _write(self) -> list[Path]:
        request = self.request
        scripts = {request.folder / name: text for name, text in self.files.items()}
        with writing(request.folder):
            if self.sources is not None:
                take_snapshot(self.sources, request.folder)
            for file, text in zip(request.job_files, request.job_texts, strict=True):
                file.parent.mkdir(exist_ok=True)
                file.write_text(text, encoding="utf-8")
            for script, text in scripts.items():
                script.write_text(text, encoding="utf-8")
                script.chmod(0o755)
            request.logs.mkdir(parents=True, exist_ok=True)
        for file in request.job_files:
            self._check_written_job(file)
        return list(scripts)

    def _check_written_job(self, file: Path) -> None:
        """The job as it will run: read from its file, with the classes that are in the copy of the code."""
        loaded = load_job(str(file), plugins=self.plugins, cwd=self.request.cwd, environ=self.environ)
        found = list(loaded.findings)
        if loaded.job is not None and self.sources is not None:
            found += check_user_code(loaded, None, self.environ, self.request.cwd).findings  # type: ignore[arg-type]
        wrong = errors_in(found)
        if wrong:
            raise ConfigError(
                "the copy of the code is not enough to run the job",
                where="submit.snapshot",
                why="\n".join(str(finding) for finding in wrong),
                fix="`git add` what is missing, name it in `submit.snapshot: ['mine/*.py']`, or set it to false",
            )

    def _record(self, job: str) -> list[Record]:
        request, output = self.request, self.submitter.output(self.request, job)
        runs = tuple(str(run) for run in request.runs)
        records = []
        for position, run in enumerate(request.runs):
            index = request.indices[position] if request.indices else None
            record = Record(
                to=self.submitter.config.name,
                id=job if index is None else self.submitter.member(job, index),
                job=job,
                index=index,
                run=str(run),
                runs=runs,
                folder=str(request.folder),
                output=str(output) if output is not None else None,
                submitted=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                submit=_dumped(self.submitter.config),
                cwd=str(request.cwd),
                sweep=self.sweep[position] if self.sweep else (),
            )
            record.write(run / SUBMISSIONS / request.folder.name)
            records.append(record)
        if request.indices:
            dataclasses.replace(records[0], id=job, run=str(self.home), sweep=()).write(request.folder)
        return records


def make_plan(
    job: Sequence[str] | JobConfig,
    *,
    to: str | None,
    overrides: Sequence[str],
    sweep: Sequence[str],
    max_parallel: int | None,
    environ: Mapping[str, str],
    plugins: PluginManager,
    cwd: Path,
) -> Plan:
    """Loads the job, once for each member of a sweep, checks it, and decides all of its submission.

    Args:
        job: Its files, or an object that has a name.
        to: The scheduler; None: what the job says.
        overrides: As `--set`.
        sweep: As `--sweep`; empty: it is no sweep.
        max_parallel: The most members that may run at once.
        environ: The environment variables of this process.
        plugins: Finds the scheduler's plugin.
        cwd: Where the ranks will work.

    Raises:
        WrongJobError: The check has found errors.
    """
    if max_parallel is not None and not sweep:
        raise ConfigError(
            "--max-parallel is for the members of a sweep", where="--max-parallel", fix="add --sweep PATH=VALUES"
        )
    common = [*overrides, *([f"submit.to={to}"] if to is not None else [])]
    grid = members(sweep) if sweep else []
    loads = load_members(job, [[*common, *one] for one in grid] or [common], plugins, cwd, environ)
    first = job_of(loads[0])
    config = _config(first.submit, plugins)
    submitter = build_submitter(_dumped(config), environ, plugins)
    indices = range(submitter.first_index, submitter.first_index + len(grid))
    resources = hardware(first)
    runs, checked = [], []
    for loaded, index in zip(loads, indices or [None], strict=True):
        run, named = _run(loaded, index, cwd)
        runs.append(run)
        seen = dataclasses.replace(loaded, job=named.model_copy(update={"resources": resources}))
        checked.append(check_job(seen, environ=environ, plugins=plugins, profile="resources", purpose="check", cwd=cwd))
    findings = warnings_of(checked)
    resolution = checked[0].resolution
    assert resolution is not None  # without errors there is one
    base = (cwd / first.run.dir).absolute()
    home = home_of(first, cwd) if grid else runs[0]
    folder = home / SUBMISSIONS / str(next_number(home, *runs))
    # With `run.dir: .` the runs lie among the code.
    apart = base if not loads[0].root.folders[0].is_relative_to(base) else home
    sources = find_sources(loads[0].root, config.snapshot, environ, without=apart)
    warn_s = warning_lead(config, runs)
    known = plugins.names("requeue")
    code = moved(loads[0].root, sources, folder)
    jobs = [with_requeuer(frozen(loaded, code, cwd), job_of(loaded), warn_s, known) for loaded in loads]
    pointer = {VARIABLE: str(folder / "code.json")} if sources is not None else {}
    request = Request(
        name=home.name,
        folder=folder,
        job_files=[folder / "members" / f"{index}.yaml" for index in indices] or [folder / "job.yaml"],
        runs=runs,
        indices=indices,
        job_texts=[text_of_job(data) for data in jobs],
        max_parallel=max_parallel or getattr(config, "max_parallel", None),
        cwd=cwd,
        nodes=resources.nodes,
        devices_per_node=resources.devices_per_node,
        device=resources.device,
        gpus=resolution.device_type != "cpu",
        cpus_per_device=resources.cpus_per_device,
        host_memory_gib=resources.host_memory_gib,
        warn_s=warn_s,
        command=command(config),
        logs=folder / "logs",
        variables={**variables(config), **pointer},
        excluded=sorted({node for run in runs for node in excluded_nodes(read_history(run / HISTORY_FILE))}),
    )
    _has_torch(config, plugins)
    return Plan(submitter, home, request, grid, sources, submitter.render(request), findings, environ, plugins)


def load_members(
    job: Sequence[str] | JobConfig,
    overrides: Sequence[Sequence[str]],
    plugins: PluginManager,
    cwd: Path,
    environ: Mapping[str, str],
) -> list[LoadedJob]:
    """A job in files, or an object, with each of these overrides; `WrongJobError` where one is invalid."""
    if isinstance(job, JobConfig) and job.run.name is None:
        raise ConfigError("a job that is no file needs a name", where="run.name", fix="RunConfig(name=...)")
    loads = []
    for own in overrides:
        if isinstance(job, JobConfig):
            parsed = [parse_override(text) for text in own]
            loads.append(load_config(job, "the job", plugins, cwd, environ, parsed, default_name=str(job.run.name)))
        else:
            loads.append(load_job(job, plugins=plugins, cwd=cwd, environ=environ, overrides=own))
    if invalid := [finding for loaded in loads if loaded.job is None for finding in loaded.findings]:
        raise WrongJobError(invalid)
    return loads


def warnings_of(checked: Sequence[CheckedJob]) -> list[Finding]:
    """What the checks of all members say, each finding once; `WrongJobError` where one is an error."""
    findings = list(dict.fromkeys(finding for one in checked for finding in one.findings))
    if errors_in(findings):
        raise WrongJobError(findings)
    return findings


def job_of(loaded: LoadedJob) -> JobConfig:
    """The job of one that is valid."""
    assert loaded.job is not None
    return loaded.job


def _config(submit: SubmitterConfigBase | None, plugins: PluginManager) -> SubmitterConfigBase:
    if submit is not None:
        return submit
    raise ConfigError(
        "the job does not say where it is to be submitted to",
        where="submit.to",
        why=f"schedulers: {', '.join(plugins.names('submitter'))}",
        fix="add submit: {to: slurm, time: '24:00:00'}, or write --to slurm",
    )


def _dumped(config: SubmitterConfigBase) -> dict[str, object]:
    data = config.model_dump(mode="json", exclude_unset=True)
    data.pop("name", None)
    return {"to": config.name, **data}


def _run(loaded: LoadedJob, index: int | None, cwd: Path) -> tuple[Path, JobConfig]:
    """The run directory, and the job under that name: an array's task is a separate run."""
    job = job_of(loaded)
    name = render_name(str(job.run.name), job.model_dump(mode="json"))
    if index is not None:
        name = f"{name}-task-{index}"
    named = job.model_copy(update={"run": job.run.model_copy(update={"name": name.replace("{", "{{")})})
    return (cwd / job.run.dir).absolute() / name, named


def home_of(job: JobConfig, cwd: Path) -> Path:
    """The folder that the members of a sweep share, named by the part of the run's name that none changes."""
    name = str(job.run.name).partition("{")[0].rstrip("-_.") or "sweep"
    return (cwd / job.run.dir).absolute() / safe_name(name)


def text_of_job(data: Mapping[str, object]) -> str:
    """A job file that means what it says; ConfigError where the job holds a secret."""
    # `submit` has the names of a cluster's secrets and keys; `variables` checks its `env`.
    looked_at = {name: section for name, section in data.items() if name != "submit"}
    shown = dict(leaves(redact(looked_at)))
    secret = next((path for path, value in leaves(looked_at) if shown.get(path, value) != value), None)
    if secret is not None:
        raise ConfigError(
            "the job holds a secret, which would be written to a file for the job",
            where=secret,
            fix="read it from an environment variable: what the shell exports when it submits is handed on",
        )
    return yaml.dump(escape(data))


def _has_torch(config: SubmitterConfigBase, plugins: PluginManager) -> None:
    if not isinstance(config, BatchSubmitterConfig) or plugins.version("torch"):
        return
    if config.python is None and config.container is None:
        raise ConfigError(
            "the job would run in this environment, which has no torch",
            where="submit.python",
            why=f"fairlead[check] is enough to submit, not to train: {command(config)[0]}",
            fix="set `submit.python` to that of the job's environment, or activate it before you submit",
        )

"""`fairlead runs`: what runs there are, and what two of them differ in."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fairlead import yaml
from fairlead.cli.session import Session
from fairlead.errors import ConfigError, FairleadError
from fairlead_runs import RunState, list_runs, state
from fairlead_runs.commands.texts import ago, find_run, metric, or_dash, shown_state, summary, table
from fairlead_runs.fingerprints import leaves
from fairlead_runs.scheduler import ask_for_jobs, job_of_run
from fairlead_runs.submitted import members, submitted_job

_COLUMNS: Final = 6
"""Settings that are shown beside the runs: more do not fit on a screen."""
_SECTIONS: Final = ("model", "data", "trainer", "run", "resources")
"""The sections of a job, those first in which an experiment differs from another."""
_OWN: Final = frozenset({"run.name", "run.dir", "run.code", "run.resume", "run.accept", "run.wait"})
"""Settings that say where a run is stored and how it was started: these may differ."""
_ALIVE_S: Final = 60.0
"""A run with a heartbeat since so long is running, whatever its scheduler says."""
_ORDERS: Final[Mapping[str, Callable[[RunState], Any]]] = {
    "name": lambda run: run.name,
    "best": lambda run: (run.best is None, 0.0 if run.best is None else run.best.rank, run.name),
    "step": lambda run: (-(run.step or 0), run.name),
    "started": lambda run: (-run.started.timestamp() if run.started is not None else 0.0, run.name),
}


def runs_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead runs`."""
    parser.usage = "fairlead runs [DIR] [--sort KEY] [--json]\n       fairlead runs diff A B [--json]"
    parser.add_argument(
        "words",
        metavar="DIR",
        nargs="*",
        default=["runs"],
        help="the folder of the run directories (default: runs), or of a sweep, to list its members; "
        "or `diff A B`: show the settings in which two runs differ",
    )
    parser.add_argument(
        "--sort",
        choices=list(_ORDERS),
        help="sort by name, or the best, furthest or newest first (default: name; for a sweep: best)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run_runs(arguments: argparse.Namespace, session: Session) -> int:
    """Lists the runs of a folder, or compares two."""
    words: list[str] = arguments.words
    if words[0] == "diff" and not (len(words) == 1 and (session.cwd / "diff").is_dir()):
        if len(words) != 3:
            raise ConfigError("diff compares two runs", where="fairlead runs", fix="write: fairlead runs diff A B")
        return _diff(words[1], words[2], session, as_json=arguments.json)
    if len(words) > 1:
        raise ConfigError(f"unexpected words: {' '.join(words[1:])}", where="fairlead runs", fix="name one folder")
    folder = session.cwd / words[0]
    sweep = members(folder)
    listed = [state(run) for run in sweep] or list_runs(folder)
    found = sorted(listed, key=_ORDERS[arguments.sort or ("best" if sweep else "name")])
    differing, states = differing_settings(found), _states(found, session)
    if arguments.json:
        shown = ({**summary(run), **dict(zip(("state", "reason"), states[run.path], strict=True))} for run in found)
        session.print_json([{**one, "settings": differing[str(one["name"])]} for one in shown])
        return 0
    if not found:
        session.print(f"no runs in {words[0]}")
        return 0
    settings = sorted({name for one in differing.values() for name in one}, key=_order)
    header = ("name", "state", "step", "metric", "best", "starts", "last heartbeat", *settings[:_COLUMNS])
    rows = [
        (
            *(run.name, states[run.path][0], or_dash(run.step), metric(run.metrics), or_dash(run.best)),
            *(str(run.starts), ago(run.heartbeat_age_s)),
            *(_shown(differing[run.name][name]) for name in settings[:_COLUMNS]),
        )
        for run in found
    ]
    for line in table([header, *rows]):
        session.print(line)
    if len(settings) > _COLUMNS:
        session.print(f"they differ in {len(settings) - _COLUMNS} more settings: --json has all")
    return 0


def _states(runs: Sequence[RunState], session: Session) -> dict[Path, tuple[str, str]]:
    """The state of each run and why: the job that is to start or restart it is queried."""
    jobs = {}
    for run in runs:
        alive = run.state == "running" and run.heartbeat_age_s is not None and run.heartbeat_age_s < _ALIVE_S
        if run.state != "finished" and not alive and (job := job_of_run(run.path)) is not None:
            jobs[run.path] = job
    status = ask_for_jobs(jobs, session.plugins, session.environ)
    return {run.path: shown_state(run, jobs.get(run.path), status.get(run.path)) for run in runs}


def _counts(name: str) -> bool:
    """Whether a setting is one of the experiment's, not of its submission."""
    path = name.replace("[", ".")
    return not path.startswith("submit.") and path != "submit" and ".".join(path.split(".")[:2]) not in _OWN


def _order(name: str) -> tuple[int, str]:
    section = name.partition(".")[0].partition("[")[0]
    return (_SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS), name)


def differing_settings(runs: Sequence[RunState]) -> dict[str, dict[str, Any]]:
    """Of each run, by name, the settings in which not all of these runs are the same; None: not set."""
    jobs = {run.name: _settings(run) for run in runs}
    names = {name for job in jobs.values() for name in job if _counts(name)}
    different = [name for name in sorted(names) if len({repr(job.get(name)) for job in jobs.values() if job}) > 1]
    return {run: {name: job.get(name) for name in different} for run, job in jobs.items()}


def _settings(run: RunState) -> dict[str, Any]:
    try:
        return dict(leaves(yaml.load_file(_job_file(run.path)).data))
    except FairleadError:  # a run that never began, or a damaged file: `status` says so
        return {}


def _job_file(run: Path) -> Path:
    """The job of a run; of one that was only submitted, that of its submission."""
    file = run / "job.yaml"
    return file if file.exists() else submitted_job(run) or file


def _diff(first: str, second: str, session: Session, *, as_json: bool) -> int:
    """The settings in which two runs' jobs differ."""
    a, b = (dict(leaves(yaml.load_file(_job_file(find_run(name, session))).data)) for name in (first, second))
    different = [name for name in sorted(a.keys() | b.keys()) if a.get(name, ...) != b.get(name, ...)]
    if as_json:
        session.print_json({name: {"a": a.get(name), "b": b.get(name)} for name in different})
        return 0
    if not different:
        session.print(f"{first} and {second} have the same settings")
        return 0
    rows = [(name, *(_shown(side[name]) if name in side else "-" for side in (a, b))) for name in different]
    for line in table([("setting", first, second), *rows]):
        session.print(line)
    return 0


def _shown(value: object) -> str:
    return yaml.dump(value).removesuffix("\n").removesuffix("\n...")

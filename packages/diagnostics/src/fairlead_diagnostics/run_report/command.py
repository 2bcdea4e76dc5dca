"""`fairlead report`: writes the page."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from fairlead.cli.session import Session
from fairlead.errors import ConfigError, RunDirectoryError
from fairlead_diagnostics.calibration import add_to_calibration, calibration_file
from fairlead_diagnostics.run_report.content import RunContent, read_content
from fairlead_diagnostics.run_report.page import page
from fairlead_runs.commands.texts import find_run
from fairlead_runs.commit import atomic_write
from fairlead_runs.describe import shown_path
from fairlead_runs.predicted import record
from fairlead_runs.states import PLAN_FILE


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead report`."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run directory, or the name of one in runs/")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="the page to write (default: report.html in the run directory; of several runs: here)",
    )
    parser.add_argument(
        "--record",
        metavar="FILE",
        help="add what was planned and what was measured to this calibration, which `fairlead plan` reads",
    )


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Writes one self-contained page about one run, or several to compare; says where, and the goodput of each."""
    paths = [find_run(name, session) for name in arguments.runs]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice.name} is named twice", where="RUN", fix="name each run once")
    file = session.cwd / arguments.output if arguments.output else _default(paths, session.cwd)
    if file.is_dir():
        raise ConfigError(f"{file} is a folder", where="--output", fix=f"-o {file / 'report.html'}")
    if not file.parent.is_dir():
        raise ConfigError(f"there is no folder {file.parent}", where="--output", fix=f"mkdir -p {file.parent}")
    calibration = calibration_file(arguments.record, session.cwd, "--record")
    runs = [read_content(path, len(paths)) for path in paths]
    if calibration is not None:
        _record(runs, calibration)
    try:
        atomic_write(file, page(runs, time.time()).encode(), error=RunDirectoryError)
    except RunDirectoryError as error:
        fix = "-o FILE, in a folder that you may write to"
        raise ConfigError("the page cannot be written", where=str(file), why=error.why, fix=fix) from error
    for one in runs:
        share = one.goodput.share
        good = f"goodput {share:.1%}" if share is not None else "no step was trained yet"
        if share is None and one.run.step:
            good = "its times are not recorded"
        session.print(f"{one.run.name}: {one.run.state}, {good}")
        if one.comparison is not None:
            session.print(f"{one.run.name}: {one.comparison.sentence()}")
    session.print(f"written: {shown_path(file, session.cwd)}")
    return 0


def _record(runs: Sequence[RunContent], file: Path) -> None:
    for one in runs:
        if one.comparison is None:
            raise ConfigError(
                f"nothing was planned of {one.run.name}",
                where="--record",
                why=f"{one.run.path} has no {PLAN_FILE}",
                fix="fairlead plan JOB --write, before the job runs",
            )
        row = record(one.comparison, one.run.path)
        device = str(one.comparison.predicted.get("device"))
        add_to_calibration(file, {"device": device, "source": "fairlead report", "date": row["date"], "runs": [row]})


def _default(paths: list[Path], here: Path) -> Path:
    return (paths[0] if len(paths) == 1 else here) / "report.html"

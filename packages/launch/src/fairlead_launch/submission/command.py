"""What `fairlead submit` takes, does and says."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fairlead.cli.job import job_arguments
from fairlead.cli.session import Session
from fairlead.errors import ConfigError
from fairlead.findings import errors_in
from fairlead_launch.submission.local import run_here
from fairlead_launch.submission.plan import Plan, WrongJobError, make_plan
from fairlead_runs.describe import counted, shown_path
from fairlead_runs.submitted import Record


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead submit`."""
    job_arguments(parser)
    parser.add_argument("--to", metavar="SCHEDULER", help="the scheduler; overrides the job's `submit.to`")
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted; write nothing")
    parser.add_argument(
        "--sweep",
        metavar="PATH=VALUES",
        action="append",
        default=[],
        help="submit a run for each value, as --sweep trainer.max_steps=100,200 or --sweep 'run.seed=range(3)'; "
        "repeatable: every combination",
    )
    parser.add_argument("--max-parallel", metavar="N", type=int, help="how many members of a sweep may run at once")
    parser.add_argument(
        "--local",
        action="store_true",
        help="run the sweep here, without a scheduler, --max-parallel trials at once (default: as many as there are "
        "GPUs for, else 1); a repeated command skips the trials that are done",
    )
    parser.add_argument("--screen", action="store_true", help="test each node before the ranks start (`submit.screen`)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Submits the job, or prints what it would submit; 2 when a finding of its check is an error."""
    if arguments.max_parallel is not None and arguments.max_parallel < 1:
        raise ConfigError("--max-parallel is at least 1", where="--max-parallel")
    try:
        return run_here(arguments, session) if arguments.local else _submit(arguments, session)
    except WrongJobError as error:
        for finding in error.findings:
            session.warn(str(finding))
        if arguments.json:
            nothing: dict[str, object] = {"trials": []} if arguments.local else {"id": None}
            session.print_json({**nothing, "findings": [finding.as_dict() for finding in error.findings]})
        what = "not started" if arguments.local else "not submitted"
        session.warn(f"{' '.join(arguments.job)}: {what} ({counted(len(errors_in(error.findings)), 'error')})")
        return 2


def _submit(arguments: argparse.Namespace, session: Session) -> int:
    made = make_plan(
        arguments.job,
        to=arguments.to,
        overrides=[*arguments.overrides, *(["submit.screen=true"] if arguments.screen else [])],
        sweep=arguments.sweep,
        max_parallel=arguments.max_parallel,
        environ=session.environ,
        plugins=session.plugins,
        cwd=session.cwd.absolute(),
    )
    for finding in made.findings:
        session.warn(str(finding))
    if arguments.dry_run:
        return _shown(made, arguments, session)
    records = made.submit()
    if arguments.json:
        session.print_json(_document(made, records))
        return 0
    for line in _summary(made, records, session.cwd):
        session.print(line)
    return 0


def _shown(made: Plan, arguments: argparse.Namespace, session: Session) -> int:
    if arguments.json:
        session.print_json(_document(made, ()))
        return 0
    for number, (name, text) in enumerate(made.files.items()):
        if len(made.files) > 1:
            session.print(f"{'' if number == 0 else chr(10)}# {name}")
        session.print(text.removesuffix("\n"))
    session.warn(f"nothing was written; the files would be in {shown_path(made.request.folder, session.cwd)}")
    return 0


def _document(made: Plan, records: Sequence[Record]) -> dict[str, object]:
    return {
        "id": records[0].job if records else None,
        "to": made.submitter.config.name,
        "folder": str(made.request.folder),
        "files": dict(made.files),
        "code": made.sources.described() if made.sources is not None else None,
        "runs": [asdict(record) for record in records] or [{"run": str(run)} for run in made.request.runs],
        "findings": [finding.as_dict() for finding in made.findings],
    }


def _summary(made: Plan, records: Sequence[Record], cwd: Path) -> list[str]:
    first, request = records[0], made.request
    runs = shown_path(request.runs[0], cwd)
    if len(records) > 1:
        runs = f"{len(records)} runs, {runs} to {shown_path(request.runs[-1], cwd)}"
    image = getattr(made.submitter.config, "image", None)
    code = f"that of {image}" if image is not None else "whatever is in the folder when it starts"
    code = made.sources.described() if made.sources is not None else code
    lines = [f"submitted to {first.to}: job {first.job}", f"  run:     {runs}", f"  code:    {code}"]
    if first.output is not None:
        lines.append(f"  output:  {shown_path(Path(first.output), cwd)}")
    lines.append(f"  files:   {shown_path(request.folder, cwd)}")
    if request.excluded:
        lines.append(f"  without: {', '.join(request.excluded)}, found to be bad by fairlead doctor within a week")
    watch = f"fairlead runs {shown_path(made.home, cwd)}" if request.indices else f"fairlead status {runs}"
    return [*lines, f"  watch:   {watch}"]

"""`fairlead check` and `fairlead explain`: what is known of a job before it costs anything."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fairlead.checks import CheckedJob, check_job
from fairlead.cli.session import Session
from fairlead.config_bases import AXES
from fairlead.findings import Finding, errors_in
from fairlead.jobs import LoadedJob, load_job

if TYPE_CHECKING:
    from fairlead.exactness import Exactness


def job_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of every command that takes a job."""
    parser.add_argument(
        "job",
        metavar="JOB",
        nargs="+",
        help="a YAML file, or module:object (a JobConfig, or a function that returns one); of several files each "
        "replaces settings of those before it",
    )
    set_argument(parser)


def set_argument(parser: argparse.ArgumentParser) -> None:
    """`--set`, which replaces a setting of a job."""
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="PATH=VALUE",
        action="append",
        default=[],
        help="replace one setting, as --set trainer.max_steps=100; repeatable",
    )


def check_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead check`."""
    _profiled_arguments(parser)
    parser.add_argument("--strict", action="store_true", help="treat warnings as errors")


def explain_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead explain`."""
    _profiled_arguments(parser)
    parser.add_argument("--all", action="store_true", help="show settings at their defaults too; --json always does")


def _profiled_arguments(parser: argparse.ArgumentParser) -> None:
    job_arguments(parser)
    parser.add_argument(
        "--for",
        dest="profile",
        metavar="PROFILE",
        help="use the hardware of the job's `resources` instead of this machine's",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def load_requested(
    arguments: argparse.Namespace, session: Session, overrides: Sequence[str] | None = None
) -> LoadedJob:
    """The job that a command names; `overrides` instead of its `--set`."""
    return load_job(
        arguments.job,
        plugins=session.plugins,
        cwd=session.cwd,
        environ=session.environ,
        overrides=arguments.overrides if overrides is None else overrides,
    )


def load_and_check(arguments: argparse.Namespace, session: Session) -> CheckedJob:
    """Loads and checks the job that a command names."""
    loaded = load_requested(arguments, session)
    return check_job(
        loaded, environ=session.environ, plugins=session.plugins, profile=arguments.profile, cwd=session.cwd
    )


def run_check(arguments: argparse.Namespace, session: Session) -> int:
    """Prints the findings; 2 when one of them would stop the job."""
    checked = load_and_check(arguments, session)
    failed = bool(errors_in(checked.findings)) or (
        arguments.strict and any(f.severity == "warning" for f in checked.findings)
    )
    if arguments.json:
        session.print_json({"ok": not failed, "findings": [f.as_dict() for f in checked.findings]})
        return 2 if failed else 0
    for finding in checked.findings:
        print(finding, file=session.stderr if finding.severity == "error" else session.stdout, flush=True)
    session.print(_verdict(" ".join(arguments.job), checked.findings, failed))
    return 2 if failed else 0


def _verdict(job: str, findings: tuple[Finding, ...], failed: bool) -> str:
    counts = {severity: sum(f.severity == severity for f in findings) for severity in ("error", "warning", "info")}
    counted = [f"{n} {s}{'s' if n > 1 and s != 'info' else ''}" for s, n in counts.items() if n]
    return f"{job}: {'not ok' if failed else 'ok'}" + (f" ({', '.join(counted)})" if counted else "")


def run_explain(arguments: argparse.Namespace, session: Session) -> int:
    """Prints every setting with its reason, and whether a resume is exact; 2 when the job is not valid."""
    checked = load_and_check(arguments, session)
    settings = checked.resolution.as_dict() if checked.resolution else {}
    exactness = _exactness(checked, session)
    if exactness is not None:
        settings["exact"] = {"value": exactness.setting.value, "reason": exactness.setting.reason}
    code = 2 if errors_in(checked.findings) else 0
    if arguments.json:
        findings = [*checked.findings]
        findings += [checked.loaded.placed(finding) for finding in exactness.findings] if exactness is not None else []
        session.print_json({"settings": settings, "findings": [f.as_dict() for f in findings]})
        return code
    shown = {name: s for name, s in settings.items() if arguments.all or not _is_default(name, s)}
    width = max((len(name) for name in shown), default=0)
    for name, setting in shown.items():
        value = _short(setting["value"])
        session.print(f"{name:<{width}}  {value:<24}  {setting['reason']}")
    if len(shown) < len(settings):
        session.print(f"and {len(settings) - len(shown)} settings with their defaults: --all shows them")
    if checked.findings:
        session.print()
    for finding in checked.findings:
        print(finding, file=session.stderr if finding.severity == "error" else session.stdout, flush=True)
    if exactness is not None:
        session.print("\n" + "\n".join(exactness.lines))
    return code


def _exactness(checked: CheckedJob, session: Session) -> Exactness | None:
    """Whether a resume is exact; None where there is no job to say it of."""
    job = checked.loaded.job
    if job is None or checked.resolution is None:
        return None
    from fairlead.exactness import explain_exactness  # only `explain` asks

    return explain_exactness(job, checked.resolution, checked.loaded.root, session.plugins)


def _is_default(name: str, setting: Mapping[str, Any]) -> bool:
    """Whether a setting is a default; what an axis is by default is worth a line."""
    return setting["reason"] == "the default" and (name not in AXES or setting["value"] is None)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."

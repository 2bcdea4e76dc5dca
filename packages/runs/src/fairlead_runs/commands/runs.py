"""`fairlead runs`: what runs there are, and what two of them differ in."""

from __future__ import annotations

import argparse

from fairlead import yaml
from fairlead.cli.session import Session
from fairlead.errors import ConfigError
from fairlead_runs import list_runs
from fairlead_runs.commands.texts import ago, find_run, metric, or_dash, summary, table
from fairlead_runs.fingerprints import leaves


def runs_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead runs`."""
    parser.usage = "fairlead runs [DIR] [--json]\n       fairlead runs diff A B [--json]"
    parser.add_argument(
        "words",
        metavar="DIR",
        nargs="*",
        default=["runs"],
        help="the folder with the run directories (default: runs); or `diff A B`: what two runs' settings differ in",
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
    found = list_runs(session.cwd / words[0])
    if arguments.json:
        session.print_json([summary(run) for run in found])
        return 0
    if not found:
        session.print(f"no runs in {words[0]}")
        return 0
    header = ("name", "state", "step", "metric", "starts", "last heartbeat")
    rows = [(r.name, r.state, or_dash(r.step), metric(r.metrics), str(r.starts), ago(r.heartbeat_age_s)) for r in found]
    for line in table([header, *rows]):
        session.print(line)
    return 0


def _diff(first: str, second: str, session: Session, *, as_json: bool) -> int:
    """The settings in which two runs' jobs differ."""
    a, b = (dict(leaves(yaml.load_file(find_run(name, session) / "job.yaml").data)) for name in (first, second))
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

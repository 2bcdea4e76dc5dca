"""`fairlead disk`: how much each run takes."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairlead import CommandPlugin
from fairlead.cli.session import Session
from fairlead.errors import ConfigError


def arguments(parser: argparse.ArgumentParser) -> None:
    """The folder."""
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", default="runs", help="where the runs are (default: runs)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Adds up the sizes of all files."""
    folder = Path(session.cwd, arguments.folder)
    if not folder.is_dir():
        raise ConfigError("there is no such folder", where=str(folder), fix="name the folder that `run.dir` names")
    sizes = {
        each.name: sum(file.stat().st_size for file in each.rglob("*") if file.is_file())
        for each in sorted(folder.iterdir())
        if each.is_dir()
    }
    if arguments.json:
        session.print_json(sizes)
    else:
        for name, size in sizes.items():
            session.print(f"{size / 1e9:10.3f} GB  {name}")
    return 0


disk = CommandPlugin(
    "disk",
    "how much each run takes",
    arguments="fairlead_site.disk:arguments",
    runtime="fairlead_site.disk:run",
    group="runs",
    example=(".",),
)

"""The command `new`: its arguments. Imports no copier."""

from __future__ import annotations

import argparse
from typing import Final

from fairlead.plugin_classes import CommandPlugin
from fairlead_templates.axes import AXES

new = CommandPlugin(
    "new",
    "make a plugin with its test, or a job that trains, from a template",
    arguments="fairlead_templates.command:new_arguments",
    runtime="fairlead_templates.generate:run",
    engines=("copier",),
    extra="new",
    group="installation",
    example=("job", "first"),
)
_NAME: Final = "in small letters, as `local_sgd`"


def new_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead new`."""
    kinds = parser.add_subparsers(dest="kind", metavar="plugin|job", required=True, help="what to make")
    text = "make a pip package with a plugin that passes the conformance suite of its axis"
    plugin = kinds.add_parser("plugin", help=text, description=text, allow_abbrev=False)
    plugin.add_argument("name", metavar="NAME", help=f"the plugin's tag, as jobs write it: {_NAME}")
    plugin.add_argument("--axis", choices=tuple(AXES), required=True, help="what it is: one of the axes of plugins")
    plugin.add_argument(
        "--class-name", metavar="NAME", help="the beginning of its classes' names (default: from NAME, as LocalSgd)"
    )
    text = "make a job file, a model and data that train on a CPU in seconds"
    job = kinds.add_parser("job", help=text, description=text, allow_abbrev=False)
    job.add_argument("name", metavar="NAME", help=f"the run's name: {_NAME}")
    for one, default in ((plugin, "fairlead-NAME"), (job, "NAME")):
        one.add_argument("-o", "--output", metavar="FOLDER", help=f"the new folder (default: {default})")

"""What would help a fit whose memory ran out, by the commands that know."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator

from fairlead.engines import requirement
from fairlead.errors import FairleadError, PluginError
from fairlead.install import install_line
from fairlead.jobs import LoadedJob
from fairlead.plugin_classes import CommandPlugin
from fairlead.plugins import PluginManager
from fairlead.resolve import Resolution


def what_helps(loaded: LoadedJob, resolution: Resolution, plugins: PluginManager) -> Iterator[str]:
    """The lines of the commands that know: `plan`, from what it predicts of this job; or how to get them."""
    commands = list(_that_know(plugins))
    for command in commands:
        assert command.out_of_memory is not None
        try:
            yield from pkgutil.resolve_name(command.out_of_memory)(loaded, resolution)
        except FairleadError as failure:
            yield f"`fairlead {command.name}` cannot say by how much: {failure.block()}"
        except Exception as failure:  # the user's code, run in another way: the fit's own error is to be shown
            yield f"`fairlead {command.name}` cannot say by how much: {type(failure).__name__}: {failure}"
    if not commands:
        yield f"`fairlead plan` comes with {install_line('plan')}"


def _that_know(plugins: PluginManager) -> Iterator[CommandPlugin]:
    for name in plugins.names("command"):
        try:
            command = plugins.command(name)
        except PluginError:
            continue  # `fairlead plugins` shows it
        if command.out_of_memory and all(plugins.is_installed(requirement(one)) for one in command.engines):
            yield command

"""Memory that ran out in a fit: how that is recognized, and what is said of it."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from typing import Final

import torch

from fairlead.engines import requirement
from fairlead.errors import FairleadError, PluginError
from fairlead.install import install_line
from fairlead.jobs import LoadedJob
from fairlead.plugin_classes import CommandPlugin
from fairlead.plugins import PluginManager
from fairlead.resolve import Resolution

_TEXTS: Final = ("out of memory", "can't allocate memory", "_STATUS_ALLOC_FAILED")
"""What torch's own errors of another class say: its allocator for CPUs, cuBLAS and cuDNN."""


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that a device's or the host's memory is used up."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def what_helps(loaded: LoadedJob, resolution: Resolution, plugins: PluginManager) -> Iterator[str]:
    """The lines of the commands that know: `plan`, from what it predicts of this job; or how to get them."""
    yield "memory ran out; a smaller batch on each rank, activation checkpointing or sharding (fsdp2) helps"
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
        yield f"by how much, `fairlead plan` says for this job: {install_line('plan')}"


def _that_know(plugins: PluginManager) -> Iterator[CommandPlugin]:
    for name in plugins.names("command"):
        try:
            command = plugins.command(name)
        except PluginError:
            continue  # `fairlead plugins` shows it
        if command.out_of_memory and all(plugins.is_installed(requirement(one)) for one in command.engines):
            yield command

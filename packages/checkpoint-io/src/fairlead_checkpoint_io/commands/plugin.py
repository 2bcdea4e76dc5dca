"""The command `checkpoint`; a subcommand's engine is imported when it runs."""

from __future__ import annotations

from fairlead.axes import CommandPlugin

__all__ = ["checkpoint"]

checkpoint = CommandPlugin(
    "checkpoint",
    "list, verify, compare, convert and export checkpoints",
    arguments="fairlead_checkpoint_io.commands.arguments:checkpoint_arguments",
    runtime="fairlead_checkpoint_io.commands.run:run_checkpoint",
    group="checkpoints",
)

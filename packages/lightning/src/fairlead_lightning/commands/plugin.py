"""The commands that run a job; the engine is imported when one of them runs."""

from __future__ import annotations

from typing import Final

from fairlead.engines import LIGHTNING
from fairlead.plugin_classes import CommandPlugin

_ENGINES: Final = (*LIGHTNING, "fairlead-distributed", "rich")


def _command(name: str, text: str) -> CommandPlugin:
    return CommandPlugin(
        name,
        text,
        arguments=f"fairlead_lightning.commands.arguments:{name}_arguments",
        runtime="fairlead_lightning.commands.local:run_here_or_on_ranks",
        engines=_ENGINES,
        extra="lightning",
        example=("no-such.yaml",),
    )


fit = _command("fit", "train a job, or resume it from its newest checkpoint")
validate = _command("validate", "evaluate the model once on the validation data")
test = _command("test", "evaluate the model once on the test data")
predict = _command("predict", "predict on all ranks into one folder, in the order of the data; resume if interrupted")
verify = CommandPlugin(
    "verify",
    "compare the split model with one process: gradients, weights and losses",
    arguments="fairlead_lightning.verify.arguments:verify_arguments",
    runtime="fairlead_lightning.verify.command:verify",
    engines=_ENGINES,
    extra="lightning",
    example=("no-such.yaml",),
)

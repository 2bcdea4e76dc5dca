"""What copies the checkpoints of a script's run to an object store, through the plugin that does so for a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from fairlead.backends import imported
from fairlead.errors import PluginError
from fairlead.plugin_classes import CheckpointIOPlugin
from fairlead.plugins import PluginManager
from fairlead.validation import dotted, findings_of
from fairlead_runs.checkpoint_io import CheckpointCopies

_BACKEND: Final = "remote"


def store_copies(copy_to: str | Mapping[str, Any], plugins: PluginManager) -> CheckpointCopies:
    """The copies at a URL, as `s3://bucket/runs`, or by the settings of `checkpoint_io: remote` with its `url`.

    Raises:
        ConfigError: A setting is wrong.
        FairleadError: The plugin is not installed.
    """
    plugin = plugins.get("checkpoint_io", _BACKEND)
    if not isinstance(plugin, CheckpointIOPlugin) or plugin.copies is None:
        raise PluginError(f"the checkpoint_io {_BACKEND!r} copies nothing by itself", where="copy_to")
    fields = {"url": copy_to} if isinstance(copy_to, str) else dict(copy_to)
    try:
        config = plugin.config.model_validate(fields, context={"plugins": plugins})
    except ValidationError as error:
        found = findings_of(error, fields, plugin.config, plugins, lambda path: f"copy_to, {dotted(path)}")
        raise found[0].as_error() from None
    copies: CheckpointCopies = imported(plugin.copies, f"the checkpoint_io {_BACKEND!r}")(config)
    return copies

"""What the settings say, and what the plugins that they choose say of themselves."""

from __future__ import annotations

from typing import Final

from fairlead.config import RunConfig
from fairlead.config.marks import inexact_settings
from fairlead.config_bases import BackendConfig
from fairlead.errors import FairleadError
from fairlead.findings import Inexact
from fairlead.hooks import answers
from fairlead.plugins import PluginManager
from fairlead.resolution import Resolution

# What computes, and what keeps the state: without its word nothing is known.  A plugin of another axis may be silent.
_MUST_SPEAK: Final = ("accelerator", "strategy", "precision", "layer_sync", "checkpoint_io")
_OPTIONAL: Final = ("environment", "requeue")


def device_reasons(resolution: Resolution, plugins: PluginManager, run: RunConfig | None = None) -> list[Inexact]:
    """What in the settings keeps a resume from being exact, or may; plugins answer through `fairlead_exactness`."""
    reasons = [*inexact_settings(run or RunConfig(), "run"), *inexact_settings(resolution.trainer, "trainer")]
    for axis in (*_MUST_SPEAK, *_OPTIONAL):
        config: BackendConfig | None = getattr(resolution, axis)
        if config is not None:
            reasons += _backend(config, resolution, plugins)
        elif axis != "layer_sync":
            reasons.append(
                Inexact(
                    f"the {axis}",
                    why="it is not decided",
                    fix="fix the errors that `fairlead check` shows",
                    certain=False,
                )
            )
    for logger in resolution.loggers:
        reasons += _asked(logger, resolution, plugins) or []
    return list(dict.fromkeys(reasons))


def _backend(config: BackendConfig, resolution: Resolution, plugins: PluginManager) -> list[Inexact]:
    """What a plugin says, and the one that it wraps."""
    reasons = _asked(config, resolution, plugins)
    if reasons is None and config.axis in _MUST_SPEAK:
        reasons = [
            Inexact(
                f"the {config.axis} {plugins.label(config)!r}",
                why="its plugin does not say whether it resumes exactly",
                fix="ask its authors for the hook fairlead_exactness, or choose another",
                certain=False,
            )
        ]
    inner = getattr(config, "inner", None)
    wrapped = _backend(inner, resolution, plugins) if isinstance(inner, BackendConfig) else []
    return [*(reasons or []), *wrapped]


def _asked(config: BackendConfig, resolution: Resolution, plugins: PluginManager) -> list[Inexact] | None:
    """What the hook of a plugin gives; None without one.  A hook that fails says nothing that can be relied on."""
    try:
        return answers(plugins, plugins.of(config), "fairlead_exactness", Inexact, resolution=resolution)
    except FairleadError as error:
        why = error.what + (f": {error.why}" if error.why else "")
    what = f"the {config.axis} {config.name!r}"
    return [Inexact(what, why=why, fix="report it to the plugin's authors, or choose another", certain=False)]

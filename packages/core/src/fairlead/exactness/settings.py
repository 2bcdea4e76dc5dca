"""What the settings say: device, strategy, precision, and what is saved when."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from fairlead.bases import BackendConfig
from fairlead.config import RunConfig, TrainerConfig
from fairlead.errors import FairleadError, PluginError
from fairlead.exactness.devices import accelerator_reasons, ddp_reasons
from fairlead.findings import Inexact
from fairlead.plugins import PluginManager
from fairlead.resolution import Resolution

__all__ = ["device_reasons"]

# What computes, and what keeps the state.  Of the other axes a plugin may speak, but its silence says nothing.
_MUST_SPEAK: Final = ("accelerator", "strategy", "precision", "layer_sync", "checkpoint_io")
_OPTIONAL: Final = ("environment", "requeue")
# Fairlead's own that write the state as it is, and have nothing to say.
_FAITHFUL: Final = frozenset(f"checkpoint_io.{name}" for name in ("async", "distributed", "remote", "torch", "xla"))


def device_reasons(resolution: Resolution, plugins: PluginManager, run: RunConfig | None = None) -> list[Inexact]:
    """What in the settings keeps a resume from being exact, or may; the loaders and the user's code are another matter.

    Args:
        resolution: Every decision of the run.
        plugins: The plugin manager: plugins speak for themselves (`fairlead_exactness`).
        run: Which run it is; None: the defaults.

    Example:
        >>> from fairlead.plugins import PluginManager
        >>> from fairlead.testing import minimal_resolution
        >>> plugins = PluginManager([])
        >>> resolution = minimal_resolution(plugins, enable_checkpointing=False)
        >>> device_reasons(resolution, plugins)[0].what
        'trainer.enable_checkpointing: false'
    """
    reasons = [*_run(run or RunConfig()), *_saved(resolution.trainer), *_loops(resolution.trainer)]
    for axis in (*_MUST_SPEAK, *_OPTIONAL):
        config: BackendConfig | None = getattr(resolution, axis)
        if config is not None:
            reasons += _backend(config, resolution, plugins)
        elif axis != "layer_sync":
            reasons.append(
                Inexact(
                    f"the {axis}",
                    why="it is not decided",
                    fix="mend the errors that `fairlead check` shows",
                    certain=False,
                )
            )
    for logger in resolution.loggers:
        reasons += _asked(logger, resolution, plugins) or []
    return list(dict.fromkeys(reasons))


def _backend(config: BackendConfig, resolution: Resolution, plugins: PluginManager) -> list[Inexact]:
    """What a plugin says; for Fairlead's own that have no hook, what is known of them here."""
    said = _asked(config, resolution, plugins)
    if said is not None or config.axis in _OPTIONAL:
        return said or []
    if config.axis == "accelerator" and (known := accelerator_reasons(config.name, resolution)) is not None:
        return known
    if config.axis == "strategy" and config.name == "ddp":
        return ddp_reasons(config, resolution)
    if f"{config.axis}.{config.name}" in _FAITHFUL:
        inner = getattr(config, "inner", None)  # the one that reads and writes
        return _backend(inner, resolution, plugins) if isinstance(inner, BackendConfig) else []
    return [
        Inexact(
            f"the {config.axis} {plugins.label(config)!r}",
            why="its plugin does not say whether it resumes exactly",
            fix="ask its authors for the hook fairlead_exactness, or choose another",
            certain=False,
        )
    ]


def _asked(config: BackendConfig, resolution: Resolution, plugins: PluginManager) -> list[Inexact] | None:
    """What the hook of a plugin gives; None without one.  A hook that fails says nothing that can be relied on."""
    try:
        results = plugins.call(plugins.of(config), "fairlead_exactness", resolution=resolution)
        return [_checked(one, config) for result in results for one in result] if results else None
    except FairleadError as error:
        because = error.what + (f": {error.why}" if error.why else "")
    except Exception as error:  # a generator of the plugin's raises while it is iterated
        because = f"fairlead_exactness raised {type(error).__name__}: {error}"
    what = f"the {config.axis} {config.name!r}"
    return [Inexact(what, why=because, fix="report it to the plugin's authors, or choose another", certain=False)]


def _checked(one: object, config: BackendConfig) -> Inexact:
    if not isinstance(one, Inexact):
        raise PluginError(
            f"fairlead_exactness of {config.axis}.{config.name} gave a {type(one).__name__}, not an Inexact"
        )
    return one


def _run(run: RunConfig) -> Iterator[Inexact]:
    if run.seed is None:
        yield Inexact(
            "run.seed: null",
            why="each start draws other random numbers, for first weights without a checkpoint and splits of the data",
            fix="run.seed: 0, or any number",
        )
    if run.resume not in ("auto", "never") and run.resume.endswith(".ckpt"):
        yield Inexact(
            f"run.resume: {run.resume}",
            why="a single file has no random state and no place in the data for each rank, unless Fairlead wrote it",
            fix="name a folder under checkpoints/, or resume: auto",
            certain=False,
        )


def _saved(trainer: TrainerConfig) -> Iterator[Inexact]:
    nothing = "no checkpoint is written: there is nothing to go on from"
    if not trainer.enable_checkpointing:
        yield Inexact("trainer.enable_checkpointing: false", why=nothing, fix="enable_checkpointing: true")
    if trainer.fast_dev_run:
        yield Inexact("trainer.fast_dev_run", why=nothing, fix="fast_dev_run: false")
    if trainer.barebones:
        yield Inexact("trainer.barebones: true", why=nothing, fix="barebones: false")
    if trainer.checkpoint.save_weights_only:
        yield Inexact(
            "trainer.checkpoint.save_weights_only: true",
            why="the state of the optimizer and the place in the epoch are not saved",
            fix="save_weights_only: false",
        )


def _loops(trainer: TrainerConfig) -> Iterator[Inexact]:
    if isinstance(trainer.val_check_interval, timedelta):
        yield Inexact(
            "trainer.val_check_interval",
            why="validation comes by the clock, so no two runs validate at the same steps",
            fix="give a number of batches, or a fraction of an epoch",
        )
    if trainer.max_time is not None:
        yield Inexact(
            "trainer.max_time",
            why="training ends by the clock, so no two runs end at the same step",
            fix="max_steps or max_epochs",
        )
    if trainer.reload_dataloaders_every_n_epochs > 1:
        yield Inexact(
            f"trainer.reload_dataloaders_every_n_epochs: {trainer.reload_dataloaders_every_n_epochs}",
            why="a start builds the loaders anew, also in an epoch where an undisturbed run keeps them",
            fix="reload_dataloaders_every_n_epochs: 1, or 0",
        )
    if trainer.overfit_batches:
        yield Inexact(
            "trainer.overfit_batches",
            why="Lightning replaces the samplers of the loaders, and no test has resumed that",
            fix="limit_train_batches and limit_val_batches",
            certain=False,
        )
    if trainer.lightning_kwargs:
        yield Inexact(
            f"trainer.lightning_kwargs: {', '.join(trainer.lightning_kwargs)}",
            why="what they do to a resume is not known",
            fix="leave them out",
            certain=False,
        )

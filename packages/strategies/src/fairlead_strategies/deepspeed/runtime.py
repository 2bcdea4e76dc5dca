"""Builds Lightning's DeepSpeed strategies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.fabric.strategies import DeepSpeedStrategy as FabricDeepSpeedStrategy
from lightning.pytorch.strategies import DeepSpeedStrategy

from fairlead.errors import ConfigError
from fairlead.interfaces import BuildContext
from fairlead_strategies.deepspeed.config import BESIDE_CONFIG, DeepSpeedStrategyConfig
from fairlead_strategies.objects import backend

__all__ = ["build"]


def build(config: DeepSpeedStrategyConfig, context: BuildContext) -> DeepSpeedStrategy | FabricDeepSpeedStrategy:
    """The strategy; DeepSpeed is imported here.

    Raises:
        ConfigError: `config` names a file that is not there or is not a JSON object.
    """
    names = set(type(config).model_fields) - {"name"}
    if config.config is not None:
        names &= BESIDE_CONFIG
    kwargs: dict[str, Any] = {name: getattr(config, name) for name in names}
    kwargs["process_group_backend"] = backend(config, context)
    if isinstance(config.config, str):
        kwargs["config"] = _read(config.config)
    if context.engine == "trainer":
        return DeepSpeedStrategy(**kwargs)
    if kwargs.get("logging_batch_size_per_gpu") == "auto":
        kwargs["logging_batch_size_per_gpu"] = None  # Fabric has no data loader to ask and takes its own default
    return FabricDeepSpeedStrategy(**kwargs)


def _read(path: str) -> dict[str, Any]:
    where = "trainer.strategy.config"
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}", where=where, why=error.strerror, fix="give the path of a JSON file"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON", where=where, why=str(error)) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}, not an object", where=where)
    return found

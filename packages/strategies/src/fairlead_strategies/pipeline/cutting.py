"""Where a module is cut, as the config says."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import nn

from fairlead.errors import ConfigError
from fairlead_distributed.parallel import plans
from fairlead_distributed.parallel.expert import mixtures_of
from fairlead_distributed.parallel.pipeline.splitting import (
    layer_costs,
    split_at,
    split_by_cost,
    split_by_counts,
)
from fairlead_strategies.mesh.config import ExpertFields, PipelineFields, TensorPlanConfig
from fairlead_strategies.mesh.experts import lists_of_experts
from fairlead_strategies.mesh.parallelize import plan_of_strategy
from fairlead_strategies.shared import load_classes


def parts_of(
    module: pl.LightningModule, layers: list[nn.Module], names: list[str], stages: int, config: PipelineFields
) -> list[range]:
    """For each stage its layers, the same on all ranks: where times are measured, they are rank 0's.

    Raises:
        ConfigError: The config does not fit the layers; the message names `trainer.strategy.split`.
    """
    try:
        return _parts(module, layers, names, stages, config)
    except ConfigError as error:
        error.where = "trainer.strategy.split"
        raise


def _parts(
    module: pl.LightningModule, layers: list[nn.Module], names: list[str], stages: int, config: PipelineFields
) -> list[range]:
    split = config.split
    if isinstance(split, tuple):
        numbers = [one for one in split if isinstance(one, int)]
        if numbers:
            return split_by_counts(len(layers), numbers, stages)
        return split_at(names, [str(one) for one in split], stages)
    costs = [1.0] * len(layers)
    if split == "parameters":
        costs = layer_costs(layers)
    return split_by_cost(
        costs,
        stages,
        first_stage_less_layers=config.first_stage_less_layers,
        last_stage_less_layers=config.last_stage_less_layers,
    )


_CLASSES = ("activation_checkpointing", "auto_wrap_policy")  # fields that name classes of layers


def check_layers(config: PipelineFields, module: nn.Module, tensor: int) -> None:
    """Whether the full module has the layers that the config names.

    Args:
        config: By their classes, in the plan by their names; and mixtures, where experts are divided.
        module: Before it is cut into stages.
        tensor: How many ranks split a layer.

    Raises:
        ConfigError: It has none of them.
    """
    if _divides_experts(config):
        mixtures_of(module)
    if tensor > 1 and isinstance(config, TensorPlanConfig):
        with plan_of_strategy():
            plans.check(module, config.plan, _left(config, module))
    for name in _CLASSES:
        paths = getattr(config, name)
        if isinstance(paths, tuple) and paths and not _present(paths, module, name):
            raise ConfigError(
                f"the model has no layer of {' or '.join(paths)}",
                where=f"trainer.strategy.{name}",
                why=f"it consists of: {', '.join(sorted({type(one).__qualname__ for one in module.modules()}))}",
                fix="name the class of its layers",
            )


def for_stage(config: PipelineFields, stage: nn.Module) -> PipelineFields:
    """The config with those classes and patterns alone that this stage has layers of: other stages have the others."""
    changes: dict[str, Any] = {
        name: _present(paths, stage, name) for name in _CLASSES if isinstance(paths := getattr(config, name), tuple)
    }
    if isinstance(config, TensorPlanConfig):
        changes["plan"] = plans.for_part(stage, config.plan, _left(config, stage))
    if _divides_experts(config) and not lists_of_experts(stage):
        changes["expert"] = 1
    return config.model_copy(update=changes)


def _divides_experts(config: PipelineFields) -> bool:
    return isinstance(config, ExpertFields) and config.expert > 1


def _left(config: PipelineFields, module: nn.Module) -> frozenset[int]:
    """The modules whose layers are not split: experts that are divided."""
    lists = lists_of_experts(module) if _divides_experts(config) else []
    return frozenset(id(part) for experts in lists for part in experts.modules())


def _present(paths: tuple[str, ...], module: nn.Module, name: str) -> tuple[str, ...]:
    found = {path: load_classes((path,), f"trainer.strategy.{name}") for path in paths}
    return tuple(path for path, kinds in found.items() if any(isinstance(m, tuple(kinds)) for m in module.modules()))

"""Tensor parallelism: each layer is split over the ranks, which share every batch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fairlead_strategies.layout import SizeOrAuto
from fairlead_strategies.mesh.fields import TensorPlanConfig
from fairlead_strategies.mesh.plugin import MeshStrategy


class TensorParallelStrategyConfig(TensorPlanConfig):
    """Each layer is split over `tensor` ranks, alone or in several copies of the model.

    Example:
        >>> config = TensorParallelStrategyConfig(tensor=2, plan={"*.up": "colwise", "*.down": "rowwise"})
        >>> str(TensorParallelStrategyConfig(tensor=2, replicate="auto").layout(4))
        'replicate 2 x tensor 2'
    """

    name: Literal["tensor_parallel"] = "tensor_parallel"
    tensor: SizeOrAuto = "auto"
    """Ranks that split each layer; `auto` is what the number of ranks leaves. No more than a node has."""
    replicate: SizeOrAuto = Field(1)
    """Replicas of the split model, each with its own batches; their gradients are averaged."""


class TensorParallel(MeshStrategy):
    """Tensor parallelism."""

    config = TensorParallelStrategyConfig


tensor_parallel = TensorParallel()

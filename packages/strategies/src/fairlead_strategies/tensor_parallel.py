"""Tensor parallelism: each layer is split over the ranks, which share every batch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from fairlead_strategies.layout import SizeOrAuto
from fairlead_strategies.mesh.config import MeshStrategyConfig
from fairlead_strategies.mesh.plugin import MeshStrategy


class TensorPlanConfig(MeshStrategyConfig):
    """How layers are split, for the strategies that do."""

    plan: dict[str, str] | Literal["auto"] = "auto"
    """Which layer is split how: patterns of module names (`blocks.*.up: colwise`, `blocks.*.down: rowwise`; of several
    that match, the last counts), with the words of `fairlead_distributed.parallel.plans.WORDS`. `auto` knows the blocks
    of Llama, Qwen, GPT-2 and torch.nn, and refuses a model in which it finds none."""
    sequence_parallel: bool = False
    """Also split what lies between the split layers, such as norms, along the sequence: less memory for activations,
    the same communication."""
    loss_parallel: bool = False
    """Leave the logits of a split output layer on their ranks and compute the cross entropy of the parts."""

    @model_validator(mode="before")
    @classmethod
    def _plan_says_something(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("plan") == {}:
            raise ValueError("`plan` is empty, and nothing would be split; write `auto`, or patterns of layers")
        return data


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
    """Copies of the split model, each with batches of its own; their gradients are averaged."""


class TensorParallel(MeshStrategy):
    """Tensor parallelism."""

    config = TensorParallelStrategyConfig


tensor_parallel = TensorParallel()

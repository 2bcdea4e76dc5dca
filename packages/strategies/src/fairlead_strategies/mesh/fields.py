"""Settings of some of the strategies on a device mesh: how layers are split, how sequences and experts are shared."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from fairlead_strategies.mesh.config import MeshStrategyConfig


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


class ContextFields(MeshStrategyConfig):
    """How the ranks that share a sequence compute its attention."""

    context_method: Literal["allgather", "ulysses"] = "allgather"
    """How attention sees the whole sequence: keys and values of all ranks are gathered, or heads are exchanged for
    positions (Ulysses, arXiv:2309.14509)."""
    context_balance: bool = True
    """Give each rank a piece of the beginning and one of the end of the sequence, so that causal attention costs all
    the same. The length must be a multiple of twice `context` then."""


class ExpertFields(MeshStrategyConfig):
    """How many ranks share the experts of a mixture."""

    expert: int = Field(1, gt=0)
    """Ranks of `shard` that share the experts of each mixture: each has some of them, reads samples of its own and
    sends their tokens to the experts that they choose. A mixture is a module with `router` (or `gate`), `experts` and
    `top_k`, whose output is the sum of the chosen experts, weighted by the router's softmax. Adds no ranks."""

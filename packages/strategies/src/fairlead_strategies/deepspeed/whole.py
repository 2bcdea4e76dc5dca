"""Whole weights and gradients of a model that DeepSpeed has split; collective on all ranks."""

from __future__ import annotations

from typing import Any

from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor
from torch.nn import Parameter

from fairlead.errors import RunFailedError


def parameters(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Each parameter whole, by its name in the unsplit model: float32 copies on the CPU.

    What is trained comes from the master weights, not from the 16-bit ones that are computed with.
    """
    return {name: _whole(parameter) for name, parameter in engine.module.named_parameters()}


def gradients(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Each gradient whole, averaged over the ranks, before clipping: float32 copies on the CPU.

    Parameters that have none are left out.

    Raises:
        RunFailedError: DeepSpeed has none, or not yet.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        try:
            gradient = safe_get_full_grad(parameter)
        except (AttributeError, KeyError, ValueError) as error:  # its three ways to say so, by stage
            raise RunFailedError(
                f"DeepSpeed has no gradient of {name}",
                where=f"ZeRO stage {engine.zero_optimization_stage()}",
                why=str(error) or type(error).__name__,
                fix="ask between the backward of a step's last batch and the step, in on_before_optimizer_step; "
                "where a module steps itself, stages 1 and 2 have none before the step",
            ) from error
        if gradient is not None:
            found[name] = _copied(gradient)
    return found


def _whole(parameter: Parameter) -> Tensor:
    whole: Any = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
    if whole is not None:
        return _copied(whole)
    with GatheredParameters([parameter]):  # frozen, or stage 0, where nothing is split and this does nothing
        return _copied(parameter)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().float().cpu().clone()

"""Full weights, gradients and optimizer state of a model that DeepSpeed has split; collective on all ranks."""

from __future__ import annotations

from typing import Any

from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from torch import Tensor
from torch.nn import Parameter

from fairlead.errors import RunFailedError
from fairlead_distributed.objects import gather_objects


def parameters(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Each full parameter by its name in the unsplit model: float32 copies on the CPU.

    What is trained comes from the master weights, not from the 16-bit ones that are computed with.
    """
    return {name: _full(parameter) for name, parameter in engine.module.named_parameters()}


def gradients(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Each full gradient, averaged over the ranks, before clipping: float32 copies on the CPU.

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


def optimizer_state(engine: DeepSpeedEngine) -> dict[str, dict[str, Tensor]] | None:
    """What the optimizer holds for each trained parameter, in full, once a step was made: float32 copies on the CPU.

    `{"head.weight": {"exp_avg": ...}}`: what has the shape of its parameter. None where it lies on an NVMe.
    """
    outer: Any = engine.optimizer
    if getattr(outer, "swap_optimizer", False):
        return None
    inner = getattr(outer, "optimizer", outer)
    shaped = {
        key
        for flat, held in inner.state.items()
        for key, value in held.items()
        if isinstance(value, Tensor) and value.ndim > 0 and value.shape == flat.shape
    }
    keys = sorted(set().union(*gather_objects(shaped)))
    trained = {id(one) for group in outer.param_groups for one in group["params"]}
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        for key in keys:
            if engine.zero_optimization_stage() == 0:
                full = inner.state.get(parameter, {}).get(key) if id(parameter) in trained else None
            else:
                full = safe_get_full_optimizer_state(parameter, key)
            if full is not None:
                found.setdefault(name, {})[key] = _copied(full)
    return found


def _full(parameter: Parameter) -> Tensor:
    full: Any = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
    if full is not None:
        return _copied(full)
    with GatheredParameters([parameter]):  # frozen, or stage 0, where nothing is split and this does nothing
        return _copied(parameter)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().float().cpu().clone()

"""How the Trainer's steps find the root's parameters: gathered, and gathered once."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.nn import Module

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def gather_for_steps(module: Module) -> None:
    """Has each step gather the parameters of the root, for Lightning calls the steps and not `forward`.

    A step that calls the module is a forward pass inside of another one. Torch takes the end of the inner one for that
    of both: it would free the root behind the step, and gather it once more for the backward pass.
    """
    if not isinstance(module, FSDPModule):  # split layers alone: nothing is gathered
        return
    for step in STEPS:
        register_fsdp_forward_method(module, step)
    state: Any = module._get_fsdp_state()
    inner: list[bool] = []

    def before(*_: Any) -> None:
        inner.append(state._training_state is TrainingState.FORWARD)

    def behind(*_: Any) -> None:
        if inner.pop():
            for one in (state, *_parameter_groups(state)):
                one._training_state = TrainingState.FORWARD

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(behind, always_call=True)


def _parameter_groups(state: Any) -> list[Any]:
    """What torch shards of one module; before torch 2.12 at most one group."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []

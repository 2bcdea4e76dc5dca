"""Splits a module, in one documented order.

1. **tensor**: layers are cut first, for whatever comes later must see the parameters that a rank really has;
2. **expert**: experts go to their ranks, before anything is sharded: what follows sees those that a rank has;
3. **context**: attention learns that each rank has a part of the sequence (no parameter changes);
4. **precision**: `trainer.precision` converts formats (bf16-true) of what a rank has. Layers that compute in another
   way (FP8) replaced them before: splitting one leaves it its arithmetic;
5. **activation checkpointing**: around blocks that compute as they will, so that what is recomputed communicates
   alike; inside of the units, so that a unit is gathered once for its second forward and its backward;
6. **fully_shard** over copies x shards (HSDP): last and outermost, around what every rank has left of each block. It
   casts to the number formats of `mixed_precision` and offloads; for split layers without any of this it is left out.
   The experts of a mixture are a separate unit, over the ranks that have the same ones.

In another order the program runs and is wrong, or slow: checkpoints outside of the units gather each unit once more,
layers that are cut after they were sharded are cut across the shards, and layers that replace others after that are
not sharded.

Every *unit* is gathered before its forward and freed after it, so the memory saved depends on how the model is cut
into units. Blocks in a `ModuleList` are what nearly all deep models have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal
from weakref import WeakSet

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.nn import Module, ModuleDict, ModuleList

from fairlead.errors import ConfigError
from fairlead_distributed._sharded import is_fsdp1
from fairlead_distributed.activation_checkpointing import checkpoint_layers
from fairlead_strategies.mesh.config import (
    ContextFields,
    ExpertFields,
    FSDP2MixedPrecision,
    MeshStrategyConfig,
    TensorPlanConfig,
)
from fairlead_strategies.mesh.device_mesh import from_first_rank, shard_mesh
from fairlead_strategies.mesh.experts import ExpertMeshes, Experts, lists_of_experts
from fairlead_strategies.shared import load_classes

Policy = set[type[Module]] | int | Literal["auto"]
"""What becomes a unit: modules of these classes, modules of at least so many parameters, or the items of lists."""


_split_here: WeakSet[Module] = WeakSet()
"""The modules that `parallelize` has split."""

_SETTINGS: Final = (
    "activation_checkpointing",
    "auto_wrap_policy",
    "cpu_offload",
    "device_mesh",
    "mixed_precision",
    "plan",
    "reshard_after_forward",
    "sequence_parallel",
    "sharding_strategy",
)
"""What a config says of how `parallelize` splits a module, beside the sizes of the mesh."""


def is_parallelised(module: Module) -> bool:
    """Whether the user's own code has sharded some part of the module already."""
    return any(isinstance(m, FSDPModule) for m in module.modules()) or any(
        isinstance(p, DTensor) for p in module.parameters()
    )


def require_no_settings(module: Module, config: MeshStrategyConfig) -> None:
    """Refuses settings of the split for a module that the user's own code has split: nothing would apply them.

    Raises:
        ConfigError: The config has any that is not the default.
    """
    if module in _split_here:  # in an earlier fit
        return
    fields = type(config).model_fields
    given = [name for name in _SETTINGS if name in fields and getattr(config, name) != fields[name].default]
    if given:
        raise ConfigError(
            f"the module shards itself, so that {', '.join(given)} would have no effect",
            where=", ".join(f"trainer.strategy.{name}" for name in given),
            why="these settings say how the strategy shards a module, and it does not shard this one",
            fix="leave them out, and give them to `fully_shard` in your code; or choose the units with torch's `wrap`",
        )


def reshard(module: Module) -> None:
    """Frees what an evaluation has left gathered, so that the module's parameters are those that optimizers know."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def blocks(module: Module, policy: Policy) -> list[Module]:
    """The submodules that become units, innermost first; raises when the model has none of the classes.

    `auto` takes the items of the outermost `ModuleList`s. A number takes submodules from the inside out, each with so
    many parameters that are in no unit yet. Neither takes one that shares a parameter with the rest of the model: a
    parameter can live in one unit only.
    """
    if isinstance(policy, set):
        return _of_classes(module, policy)
    found = list(_listed(module)) if policy == "auto" else _large(module, policy)
    uses = _inside(module)
    return [item for item in found if all(_inside(item)[p] == uses[p] for p in map(id, item.parameters()))]


def _of_classes(module: Module, classes: set[type[Module]]) -> list[Module]:
    found = [m for m in module.modules() if m is not module and isinstance(m, tuple(classes))]
    if classes and not found:
        names = sorted({type(m).__qualname__ for m in module.modules() if m is not module})
        raise ConfigError(
            f"the model has no {' or '.join(sorted(c.__qualname__ for c in classes))}",
            where="trainer.strategy.auto_wrap_policy",
            why=f"it consists of: {', '.join(names)}",
            fix="name the class of its layers, or write `auto_wrap_policy: auto`",
        )
    return found[::-1]


def _listed(module: Module) -> Iterator[Module]:
    for child in module.children():
        if isinstance(child, ModuleList):
            yield from (item for item in child if any(True for _ in item.parameters()))
        else:
            yield from _listed(child)


def _large(module: Module, least: int) -> list[Module]:
    found: list[Module] = []

    def visit(part: Module) -> set[int]:
        """The parameters of a part that are in no unit."""
        free = {id(p) for p in part.parameters(recurse=False)}
        for child in part.children():
            free |= visit(child)
        # A container has no forward, before which it could be gathered.
        container = part is module or isinstance(part, (ModuleList, ModuleDict))
        if container or sum(sizes[p] for p in free) < least:
            return free
        found.append(part)
        return set()

    sizes = {id(p): p.numel() for p in module.parameters()}
    visit(module)
    return found


def _inside(module: Module) -> Counter[int]:
    return Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))


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


def parallelize(
    module: Module,
    mesh: DeviceMesh,
    config: MeshStrategyConfig,
    device: torch.device,
    convert: Callable[[Module], Module] | None = None,
    *,
    stage: tuple[bool, bool] | None = None,
    experts: ExpertMeshes | None = None,
    chosen: Sequence[Module] = (),
) -> Module:
    """Splits a module in place over a mesh, in the order above; every rank starts from the first rank's values.

    Args:
        module: A full model, or one stage of a pipeline; on any device. Parameters on the meta device are left to be
            initialised later.
        mesh: With a dimension `shard`, and any of `replicate`, `context` and `tensor`; a dimension `pipeline` says only
            which ranks have another stage.
        config: What is done to it.
        device: Where it will be computed.
        convert: What the precision does to a module, in place.
        stage: For a stage of a pipeline, whether it is the first and whether it is the last.
        experts: Between which ranks experts are divided; None: not, or found from the mesh by a collective of all.
        chosen: Modules that become units; without any, `auto_wrap_policy: auto` chooses them.

    Raises:
        ConfigError: The module has no layers of the classes, none that can be split as requested, or some that are
            wrapped in FullyShardedDataParallel.
    """
    wrapped = next((part for part in module.modules() if is_fsdp1(part)), None)
    if wrapped is not None:
        raise ConfigError(
            f"{type(wrapped.module).__name__} is wrapped in FullyShardedDataParallel",
            where=f"{type(module).__name__}.configure_model",
            why=f"`strategy: {config.name}` shards with torch's fully_shard, which cannot be combined with it",
            fix="choose the layers with torch's `wrap(layer)`, or with trainer.strategy.auto_wrap_policy",
        )
    names = mesh.mesh_dim_names or ()
    for tensor in (*module.parameters(), *module.buffers()):
        # One at a time, so that no device must hold the full model. Ranks that were seeded differently would otherwise
        # each contribute their part of a different model.
        from_first_rank(tensor, mesh, device)
    units = _units(module, wrap_policy(config), chosen)
    sharing = config.expert if isinstance(config, ExpertFields) else 1
    if "tensor" in names:
        _split_layers(module, mesh["tensor"], config, lists_of_experts(module) if sharing > 1 else ())
    divided = None
    if sharing > 1:
        divided = Experts(module, experts or ExpertMeshes.of(mesh, sharing))
        units = divided.without(units)
    if "context" in names:
        _share_sequences(module, mesh["context"], config, stage)
    if convert is not None:
        module = convert(module)
    if config.activation_checkpointing:
        checkpoint_layers(module, checkpointed_classes(config))
    over = shard_mesh(mesh)
    casts = config.mixed_precision is not None
    # Of split layers on one rank of shards a unit would only copy the parameters, in each pass.
    if over.size() > 1 or "tensor" not in names or casts or config.cpu_offload:
        _shard(module, units, divided, over, config, device)
    _split_here.add(module)
    return module


def _units(module: Module, policy: Policy, chosen: Sequence[Module]) -> list[Module]:
    """The chosen modules and those of the policy, innermost first; `auto` stands back where any is chosen."""
    inside = [part for part in module.modules() if part is not module]
    own = {part for part in inside if part in chosen}
    if not own:
        return blocks(module, policy)
    units = own if policy == "auto" else own.union(blocks(module, policy))
    return [part for part in reversed(inside) if part in units]


def shard_rest(module: Module, over: DeviceMesh, mesh: DeviceMesh, device: torch.device) -> bool:
    """Makes a unit of the parameters that the user's code left out when it applied `fully_shard` to some layers.

    Nothing would average their gradients over the ranks. They start from the values of the first rank.

    Args:
        module: With layers that are sharded already.
        over: Which ranks share the shards.
        mesh: All ranks.
        device: Where it will be computed.

    Returns:
        Whether there were any.
    """
    rest = [parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)]
    if not rest or isinstance(module, FSDPModule) or not any(isinstance(m, FSDPModule) for m in module.modules()):
        return False
    for parameter in rest:
        from_first_rank(parameter, mesh, device)
    fully_shard(module, mesh=over, reshard_after_forward=False)
    return True


def _split_layers(module: Module, mesh: DeviceMesh, config: MeshStrategyConfig, leave: Iterable[Module]) -> None:
    if not isinstance(config, TensorPlanConfig):
        raise ConfigError(
            "the module does not say how to split its layers",
            where="trainer.strategy.tensor",
            why=f"tensor: {mesh.size()}, but no parameter is parallelised, and `{config.name}` has no plan",
            fix=f"strategy: {{name: hybrid, tensor: {mesh.size()}}}, or apply `parallelize_module(self, "
            "self.device_mesh['tensor_parallel'], plan)` in its `configure_model`",
        )
    from fairlead_distributed.parallel.tensor import parallelize_tensor

    with plan_of_strategy():
        parallelize_tensor(
            module,
            mesh,
            config.plan,
            sequence_parallel=config.sequence_parallel,
            loss_parallel=config.loss_parallel,
            leave=leave,
        )


@contextmanager
def plan_of_strategy() -> Iterator[None]:
    """Errors about a plan name the setting that it comes from."""
    try:
        yield
    except ConfigError as error:
        if error.where is not None and error.where.startswith("plan"):
            error.where = f"trainer.strategy.{error.where}"
        raise


def _share_sequences(
    module: Module, mesh: DeviceMesh, config: MeshStrategyConfig, stage: tuple[bool, bool] | None
) -> None:
    from fairlead_distributed.parallel.context import parallelize_context

    assert isinstance(config, ContextFields)  # no other has the dimension
    parallelize_context(module, mesh, method=config.context_method, balance=config.context_balance, stage=stage)


def _shard(
    module: Module,
    units: Iterable[Module],
    experts: Experts | None,
    mesh: DeviceMesh,
    config: MeshStrategyConfig,
    device: torch.device,
) -> None:
    options: dict[str, Any] = {
        "mp_policy": _mixed_precision(config.mixed_precision),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if config.cpu_offload else OffloadPolicy(),
    }
    if experts is not None:
        home = torch.device("cpu") if config.cpu_offload else device
        experts.shard(home, options, reshard=config.frees_units)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=config.frees_units, **options)
    # The root is needed at once for backward, so freeing it would only cost a second gather.
    fully_shard(module, mesh=mesh, reshard_after_forward=False, **options)


def _mixed_precision(requested: Literal[True] | FSDP2MixedPrecision | None) -> MixedPrecisionPolicy:
    if requested is None:
        return MixedPrecisionPolicy()
    if requested is True:
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    formats = {
        name: getattr(torch, value) if (value := getattr(requested, name)) is not None else None
        for name in ("param_dtype", "reduce_dtype", "output_dtype")
    }
    return MixedPrecisionPolicy(**formats, cast_forward_inputs=requested.cast_forward_inputs)


def wrap_policy(config: MeshStrategyConfig) -> Policy:
    """The policy of the config, with its classes imported."""
    policy = config.auto_wrap_policy
    return load_classes(policy, "trainer.strategy.auto_wrap_policy") if isinstance(policy, tuple) else policy


def checkpointed_classes(config: MeshStrategyConfig) -> set[type[Module]]:
    """The classes of `activation_checkpointing`, imported."""
    return load_classes(config.activation_checkpointing or (), "trainer.strategy.activation_checkpointing")

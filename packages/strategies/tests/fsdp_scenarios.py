"""What one rank does in the tests of `strategy: fsdp`: all scenarios of a world size in one start of the ranks."""

from __future__ import annotations

import functools
import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import wrap
from torch.utils.data import DataLoader

from fairlead_distributed.activation_checkpointing import is_checkpointed
from fairlead_strategies import FSDPStrategyConfig
from fairlead_strategies.fsdp_runtime import build

sys.path.insert(0, str(Path(__file__).parent))
scenarios: Any = importlib.import_module("scenarios")
context = importlib.import_module("ranks").context

BLOCKS = ["torch.nn:Linear"]
BYTES = 4  # of a float32


class Watch(pl.Callback):
    """Notes loss, gradients and their norm in the first step, before they are clipped."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: dict[str, Tensor] = {}

    def on_train_batch_end(self, loop: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        if outputs:  # of automatic optimization
            self.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, loop: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if self.gradients:
            return
        strategy: Any = loop.strategy
        if hasattr(strategy, "full_gradients"):
            self.gradients = strategy.full_gradients()
        else:
            self.gradients = {n: p.grad.detach().clone() for n, p in module.named_parameters() if p.grad is not None}


def fsdp(**fields: Any) -> Any:
    config = FSDPStrategyConfig(**{"auto_wrap_policy": BLOCKS, **fields})
    return build(config, context(config, world_size=scenarios.world, devices=scenarios.world))


def weights(loop: pl.Trainer) -> dict[str, Tensor]:
    strategy: Any = loop.strategy
    found: dict[str, Tensor] = strategy.full_parameters()
    return {name: value.double() for name, value in found.items()}


_alone: dict[str, tuple[dict[str, Tensor], Watch]] = {}


def single(make: Callable[[], Any], **kwargs: Any) -> tuple[dict[str, Tensor], Watch]:
    """The reference: one process, the whole batch, rank 0's initial weights; once for equal settings."""
    key = f"{make.__qualname__} {kwargs}"
    if key not in _alone:
        watch, module = Watch(), scenarios.seeded(make, 100)
        scenarios.trainer(None, callbacks=[watch], **kwargs).fit(module, DataLoader(scenarios.data, batch_size=8))
        _alone[key] = {name: p.detach().double() for name, p in module.named_parameters()}, watch
    return _alone[key]


def compare(strategy: Any, make: Callable[[], Any] = scenarios.Net, **kwargs: Any) -> dict[str, Any]:
    """Loss, gradients and weights of a training against one process; on all ranks, since each computes both."""
    expected, alone = single(scenarios.Net if make in (FlatNet, Wrapping) else make, **kwargs)
    watch = Watch()
    _, loop = scenarios.pair(strategy, make, callbacks=[watch], **kwargs)
    found = weights(loop)
    start = {name: p.detach().double() for name, p in scenarios.seeded(make, 100).named_parameters()}
    losses = torch.tensor(watch.losses)
    dist.all_reduce(losses)
    return {
        "weights": scenarios.apart(expected, found),
        "gradients": scenarios.apart(alone.gradients, watch.gradients),
        "size": float(torch.stack([g.norm() for g in alone.gradients.values()]).norm()),
        "losses": float((losses / scenarios.world - torch.tensor(alone.losses)).abs().max()),
        "moved": min(float((start[name] - found[name]).abs().max()) for name in found),
        "steps": len(alone.losses),
    }


class FlatNet(scenarios.Net):  # type: ignore[misc]  # loaded at run time
    """Gives the optimizer what there is after wrapping: flat parameters."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.trainer.model.parameters(), lr=0.02)


class Wrapping(scenarios.Net):  # type: ignore[misc]
    """Chooses two units itself, and leaves the rest of its layers to the strategy."""

    def configure_model(self) -> None:
        if not any(isinstance(part, FullyShardedDataParallel) for part in self.modules()):
            for owner, name in ((self, "inlet"), (self.blocks, "1")):
                setattr(owner, name, wrap(getattr(owner, name)))


class Groups(scenarios.Net):  # type: ignore[misc]
    """Two groups that are not in the order of the parameters."""

    def configure_optimizers(self) -> Any:
        biases: Any = [p for name, p in self.named_parameters() if name.endswith("bias")]
        others: Any = [p for name, p in self.named_parameters() if name.endswith("weight")]
        return torch.optim.Adam([{"params": biases, "lr": 0.01}, {"params": others}], lr=0.02)


class Counts(Watch):
    """Notes the collectives of the last step, and the bytes that this rank holds in it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}
        self.profile: Any = None

    def on_train_batch_start(self, *_: Any) -> None:
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.profile.start()

    def on_before_backward(self, loop: pl.Trainer, *_: Any) -> None:
        self.found["parameters"] = held(loop.model)

    def on_before_optimizer_step(self, loop: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        gradients = [p.grad for p in loop.model.parameters() if p.grad is not None]  # type: ignore[union-attr]
        self.found["gradients"] = distinct(gradients)

    def on_train_batch_end(self, loop: pl.Trainer, *_: Any) -> None:
        self.profile.stop()
        names = [event.name for event in self.profile.events()]
        self.found["all_gathers"] = names.count("c10d::allgather_") + names.count("c10d::_allgather_base_")
        self.found["reduce_scatters"] = names.count("c10d::_reduce_scatter_base_")
        self.found["all_reduces"] = names.count("c10d::allreduce_")
        states = [t for state in loop.optimizers[0].state.values() for t in state.values()]
        self.found["optimizer"] = sum(t.numel() * t.element_size() for t in states if t.ndim)


def distinct(tensors: Any) -> int:
    """The bytes of all memory behind some tensors."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def held(model: Any) -> int:
    """The bytes of parameters on this rank: its own shards, and what is gathered at the moment."""
    flat = [part._handle.flat_param for part in model.modules() if getattr(part, "_handle", None)]
    parts = [getattr(one, name, None) for one in flat for name in ("data", "_local_shard", "_full_param_padded")]
    return distinct(part for part in parts if part is not None)


def counted(accumulate: int = 1, **fields: Any) -> dict[str, int]:
    """Of the third batch; with `accumulate` it is the first of its step."""
    few: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 4 if accumulate > 1 else 3}
    counts = Counts()
    scenarios.pair(fsdp(**fields), scenarios.Net, accumulate_grad_batches=accumulate, callbacks=[counts], **few)
    return counts.found


def no_shard_is_ddp() -> dict[str, Any]:
    """Bit for bit; and after how many bytes of weights."""
    one = weights(scenarios.pair(fsdp(sharding_strategy="NO_SHARD"), scenarios.Net)[1])
    module, _ = scenarios.pair(scenarios.ddp(), scenarios.Net)
    other = scenarios.weights(module)
    return {"equal": all(torch.equal(one[name], other[name]) for name in other), "compared": len(other)}


def checkpointed_layers() -> list[str]:
    module, _ = scenarios.pair(fsdp(activation_checkpointing=["torch.nn:Sequential"]), scenarios.Net, max_epochs=1)
    return [name for name, part in module.named_modules() if is_checkpointed(part)]


def called_outside() -> dict[str, float]:
    """The module itself after a fit and after a validation, on all ranks together: with whole weights."""
    module, loop = scenarios.pair(fsdp(auto_wrap_policy=["torch.nn:Sequential"]), scenarios.Net, max_epochs=1)
    plain = scenarios.Net()
    plain.load_state_dict(loop.strategy.full_parameters())
    x = scenarios.data.tensors[0]
    with torch.no_grad():
        first = float((module(x) - plain(x)).abs().max())
        loop.validate(module, scenarios.share(), verbose=False)
        return {"after_fit": first, "after_validation": float((module(x) - plain(x)).abs().max())}


def low_precision(mode: str, **fields: Any) -> dict[str, Any]:
    module, loop = scenarios.pair(fsdp(**fields), scenarios.Net, precision=mode)
    with FullyShardedDataParallel.summon_full_params(loop.model):
        dtypes = {str(p.dtype) for p in module.parameters()}
    unit = next(part for part in loop.model.modules() if getattr(part, "_handle", None))
    policy = unit.mixed_precision
    start = {name: p.detach().double() for name, p in scenarios.seeded(scenarios.Net, 100).named_parameters()}
    return {
        "held": sorted(dtypes),
        "computed": str(policy.param_dtype),
        "reduced": str(policy.reduce_dtype),
        "moved": min(float((start[name] - value).abs().max()) for name, value in weights(loop).items()),
    }


def resume(folder: str, make: Callable[[], Any] = Groups, clip: float | None = None, **fields: Any) -> dict[str, Any]:
    """Three epochs at once, and as one that is saved and two that go on."""
    straight = weights(scenarios.pair(fsdp(**fields), make, max_epochs=3, gradient_clip_val=clip)[1])
    _, loop = scenarios.pair(fsdp(**fields), make, max_epochs=1, gradient_clip_val=clip)
    path = Path(folder, "-".join(["one", str(clip), *map(str, fields.values())]) + ".ckpt")
    loop.save_checkpoint(path)
    resumed = scenarios.trainer(fsdp(**fields), max_epochs=3, gradient_clip_val=clip)
    resumed.fit(scenarios.seeded(make, 500 + scenarios.rank), scenarios.share(), ckpt_path=path)
    found = weights(resumed)
    return {"equal": all(torch.equal(found[n], straight[n]) for n in straight), "file": path.is_file()}


def into_another(folder: str) -> dict[str, Any]:
    """What FSDP has saved whole, DDP goes on with, and the other way round: the same as without a change."""
    found = {}
    for name, first, second in (("to_ddp", fsdp, scenarios.ddp), ("from_ddp", scenarios.ddp, fsdp)):
        straight, _ = scenarios.pair(scenarios.ddp(), Groups, max_epochs=3)
        _, loop = scenarios.pair(first(), Groups, max_epochs=1)
        path = Path(folder, f"{name}.ckpt")
        loop.save_checkpoint(path)
        module = scenarios.seeded(Groups, 500 + scenarios.rank)
        resumed = scenarios.trainer(second(), max_epochs=3)
        resumed.fit(module, scenarios.share(), ckpt_path=path)
        last = scenarios.weights(module) if second is scenarios.ddp else weights(resumed)
        found[name] = scenarios.apart(scenarios.weights(straight), last)
    return found


def fabric(folder: str) -> dict[str, Any]:
    """A loop of one's own: four steps, clipped, against plain torch; then saved after two and resumed."""

    def step(module: Any, optimizer: Any, rows: slice, start: int, clip: Callable[[], Any], backward: Any) -> None:
        x, y = (t[start : start + 8][rows] for t in scenarios.data.tensors)
        backward(nn.functional.mse_loss(module(x), y))
        clip()
        optimizer.step()
        optimizer.zero_grad()

    plain = scenarios.seeded(scenarios.Net, 100)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.02)
    for start in range(0, 32, 8):
        clip = functools.partial(nn.utils.clip_grad_norm_, plain.parameters(), 0.05)
        step(plain, optimizer, slice(None), start, clip, torch.Tensor.backward)

    def sharded(seed: int, starts: range, load: Path | None = None, save: Path | None = None) -> dict[str, Tensor]:
        config = FSDPStrategyConfig.model_validate({"auto_wrap_policy": BLOCKS})
        strategy: Any = build(config, context(config, "fabric"))
        engine = Fabric(accelerator="cpu", strategy=strategy, devices=2, plugins=[TorchElasticEnvironment()])
        engine.launch()
        module = engine.setup_module(scenarios.seeded(scenarios.Net, seed + scenarios.rank))
        inner: Any = engine.setup_optimizers(torch.optim.Adam(module.parameters(), lr=0.02))
        state: dict[str, Any] = {"model": module, "optimizer": inner}
        if load is not None:
            engine.load(load, state)
        for start in starts:
            clip = functools.partial(engine.clip_gradients, module, inner, max_norm=0.05)
            step(module, inner, slice(scenarios.rank, None, 2), start, clip, engine.backward)
        if save is not None:
            engine.save(save, state)
        found: dict[str, Tensor] = strategy.full_parameters(module)
        return {name: value.double() for name, value in found.items()}

    path = Path(folder, "fabric.ckpt")
    straight = sharded(100, range(0, 32, 8))
    sharded(100, range(0, 16, 8), save=path)
    resumed = sharded(500, range(16, 32, 8), load=path)
    expected = {name: p.detach().double() for name, p in plain.named_parameters()}
    return {"apart": scenarios.apart(expected, straight), "resumed": scenarios.apart(straight, resumed)}


def two_ranks(folder: str) -> dict[str, Callable[[], Any]]:
    policy = {"param_dtype": "bfloat16", "cast_forward_inputs": True}
    strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    return {
        **{name: functools.partial(compare, fsdp(sharding_strategy=name)) for name in strategies},
        "one_unit": lambda: compare(fsdp(auto_wrap_policy=None)),
        "by_size": lambda: compare(fsdp(auto_wrap_policy=100)),
        "checkpointed": lambda: compare(fsdp(activation_checkpointing=["torch.nn:Sequential"])),
        "clip_norm": lambda: compare(fsdp(), gradient_clip_val=0.05),
        "clip_value": lambda: compare(fsdp(), gradient_clip_val=0.001, gradient_clip_algorithm="value"),
        "manual": lambda: scenarios.refused(lambda: scenarios.pair(fsdp(), lambda: scenarios.Net(manual=True)))(),
        "accumulate": lambda: compare(fsdp(), accumulate_grad_batches=2),
        "flat": lambda: compare(fsdp(use_orig_params=False), FlatNet),
        "cpu_offload": lambda: compare(fsdp(cpu_offload=True)),
        "own_units": lambda: compare(fsdp(), Wrapping),
        "layers": checkpointed_layers,
        "called_outside": called_outside,
        "counted accumulate": lambda: counted(accumulate=2),
        **{f"counted {name}": functools.partial(counted, sharding_strategy=name) for name in strategies},
        "no_shard_is_ddp": no_shard_is_ddp,
        "bf16-mixed": lambda: low_precision("bf16-mixed"),
        "bf16-true": lambda: low_precision("bf16-true"),
        "policy": lambda: low_precision("32-true", mixed_precision=policy),
        "resume": lambda: resume(folder),
        "resume_sharded": lambda: resume(folder, state_dict_type="sharded"),
        "resume_flat": lambda: resume(folder, FlatNet, use_orig_params=False),
        "into_another": lambda: into_another(folder),
        "fabric": lambda: fabric(folder),
    }


def three_ranks(folder: str) -> dict[str, Callable[[], Any]]:
    return {
        "resume": lambda: resume(folder),
        "resume_clipped": lambda: resume(folder, clip=0.05),
    }


def four_ranks(folder: str) -> dict[str, Callable[[], Any]]:
    mesh: dict[str, Any] = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}
    return {
        "HYBRID_SHARD": lambda: compare(fsdp(**mesh)),
        "clip_norm": lambda: compare(fsdp(**mesh), gradient_clip_val=0.05),
        "counted": lambda: counted(**mesh),
        "_HYBRID_SHARD_ZERO2": lambda: compare(fsdp(**{**mesh, "sharding_strategy": "_HYBRID_SHARD_ZERO2"})),
        "resume": lambda: resume(folder, **mesh),
    }


def run(table: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, scenario in table.items():
        try:
            results[name] = scenario()
        except Exception:  # the other ranks would wait in a collective; the test shows this text instead
            results[name] = {"failed": traceback.format_exc()}
        dist.barrier()
    return results

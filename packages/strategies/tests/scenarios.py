"""One rank of the training tests: `RANK=0 WORLD_SIZE=2 ... python scenarios.py OUT [NAME...]`.

Every scenario below runs in the order of the table at the end, and rank 0 writes what came out as JSON.  One start of
Python serves them all, because importing torch and Lightning takes longer than the training.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import tempfile
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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fairlead.errors import ConfigError
from fairlead_strategies import (
    DDPStrategyConfig,
    FSDP2StrategyConfig,
    FSDPStrategyConfig,
    TorchSyncBatchNormLayerSyncConfig,
)
from fairlead_strategies.ddp_runtime import build as build_ddp
from fairlead_strategies.mesh.parallelize import is_parallelised
from fairlead_strategies.mesh_build import build as build_fsdp2
from fairlead_strategies.sync_batchnorm_runtime import build as build_sync_batchnorm

ranks: Any = importlib.import_module("ranks")  # beside this file
context = ranks.context

torch.set_num_threads(1)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Net(pl.LightningModule):
    """A small residual network whose layers are in a ModuleList, as most are."""

    def __init__(self, direct: bool = False, manual: bool = False, norm: bool = False, eps: float = 1e-8) -> None:
        super().__init__()
        self.eps = eps
        self.direct = direct
        self.automatic_optimization = not manual
        self.inlet = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3))
        self.norm = nn.BatchNorm1d(12) if norm else nn.Identity()
        self.head = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(self.norm(x))
        return out

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = (part.to(self.head.bias.dtype) for part in batch)
        out = Net.forward(self, x) if self.direct else self(x)
        loss: Tensor = nn.functional.mse_loss(out.to(y.dtype), y)  # torch 2.9 has no backward pass for two formats
        return loss

    def training_step(self, batch: list[Tensor]) -> Tensor | None:
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02, eps=self.eps)


class Configured(Net):
    """A module with a `configure_model` of its own that builds layers but shards nothing."""

    def configure_model(self) -> None:
        self.tail = nn.Identity()


class Own(Net):
    """A module that shards itself, as one unit, and takes care that all ranks start alike."""

    def __init__(self) -> None:
        torch.manual_seed(100)
        super().__init__()

    def configure_model(self) -> None:
        if dist.is_initialized() and not is_parallelised(self):
            mesh: Any = self.device_mesh
            if mesh is not None:
                fully_shard(self, mesh=mesh["data_parallel"])


class Branching(Net):
    """A module with parameters that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(12, 12)


class Wide(Net):
    """A module of 4.6 MiB, so that buckets of 1 MiB and of 25 MiB differ in number."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(*[nn.Linear(12, 24_000), nn.Linear(24_000, 12)] * 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + 0 * self.wide(torch.zeros(1, 12)).sum()
        return out


generator = torch.Generator().manual_seed(7)
data = TensorDataset(torch.randn(32, 6, generator=generator), torch.randn(32, 2, generator=generator))


def seeded(make: Callable[[], Net], seed: int) -> Net:
    torch.manual_seed(seed)
    return make()


def trainer(strategy: Any, **kwargs: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    # Lightning's own sampler shuffles training data even where the loader does not.
    options = {"enable_checkpointing": False, "max_epochs": 2, "limit_val_batches": 0, **quiet, **kwargs}
    options["use_distributed_sampler"] = False
    if strategy is None:
        return pl.Trainer(accelerator="cpu", devices=1, **options)
    plugins = [TorchElasticEnvironment(), *options.pop("plugins", [])]
    return pl.Trainer(accelerator="cpu", devices=world, strategy=strategy, plugins=plugins, **options)


def weights(module: nn.Module) -> dict[str, Tensor]:
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}
    return {name: tensor.detach().to(torch.float64).clone() for name, tensor in full.items()}


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys(), (a.keys(), b.keys())
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def single(make: Callable[[], Net], **kwargs: Any) -> dict[str, Tensor]:
    """The reference: one process, the whole batch, rank 0's initial weights."""
    module = seeded(make, 100)
    trainer(None, **kwargs).fit(module, DataLoader(data, batch_size=8))
    return weights(module)


def share() -> DataLoader[Any]:
    """This rank's part of every global batch: of two, rank 0 takes samples 0, 2, 4, 6 of the first eight."""
    return DataLoader(data, batch_size=8 // world, sampler=DistributedSampler(data, world, rank, shuffle=False))


def pair(strategy: Any, make: Callable[[], Net], **kwargs: Any) -> tuple[Net, pl.Trainer]:
    """Two ranks, half a batch each, and other initial weights on rank 1."""
    module = seeded(make, 100 + rank)
    loop = trainer(strategy, **kwargs)
    loop.fit(module, share(), share())
    return module, loop


def compare(strategy: Any, make: Callable[[], Net] = Net, **kwargs: Any) -> dict[str, Any]:
    alone = {name: value for name, value in kwargs.items() if name != "callbacks"}
    reference = single(make, **alone) if rank == 0 else None
    module, _ = pair(strategy, make, **kwargs)
    final = weights(module)
    start = weights(seeded(make, 100))
    moved = apart({n: start[n] for n in final}, final)
    return {"apart": apart(reference, final) if reference else None, "moved": moved}


def ddp(**fields: Any) -> Any:
    config = DDPStrategyConfig(**fields)
    return build_ddp(config, context(config))


def fsdp2(**fields: Any) -> Any:
    config = FSDP2StrategyConfig(**fields)
    return build_fsdp2(config, context(config))


class Calls(pl.Callback):
    """Counts the all-reduces of the last step, in torch's own profile of it, and notes the hook."""

    def __init__(self) -> None:
        self.count = 0
        self.counts: list[int] = []
        self.hook: str | None = None
        self.profile: Any = None

    def on_train_batch_start(self, *args: Any) -> None:
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.profile.start()

    def on_train_batch_end(self, loop: pl.Trainer, *args: Any) -> None:
        self.profile.stop()
        self.count = sum(e.name == "gloo:all_reduce" for e in self.profile.events())
        self.counts.append(self.count)
        model: Any = loop.strategy.model
        self.hook = model._get_ddp_logging_data().get("comm_hook")


def ddp_buckets() -> dict[str, Any]:
    counts = {}
    for size in (1, 25):
        calls = Calls()
        pair(ddp(bucket_cap_mb=size), Wide, max_epochs=1, limit_train_batches=3, callbacks=[calls])
        counts[str(size)] = calls.count
    return counts


def ddp_accumulate() -> dict[str, Any]:
    calls = Calls()
    found = compare(ddp(), accumulate_grad_batches=2, max_epochs=1, callbacks=[calls])
    return {**found, "counts": calls.counts}


def ddp_hook(**fields: Any) -> dict[str, Any]:
    calls = Calls()
    return {**compare(ddp(**fields), callbacks=[calls]), "hook": calls.hook}


def ddp_hook_fabric() -> dict[str, Any]:
    config = DDPStrategyConfig(ddp_comm_hook="fp16")
    strategy: Any = build_ddp(config, context(config, "fabric"))
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=2, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    module: Any = fabric.setup_module(nn.Linear(2, 2))
    module(torch.ones(1, 2)).sum().backward()
    return {"hook": module._forward_module._get_ddp_logging_data().get("comm_hook")}


def sharded_bytes() -> dict[str, Any]:
    module, _ = pair(fsdp2(), Net, max_epochs=1)
    local = sum(p.to_local().numel() for p in module.parameters() if isinstance(p, DTensor))
    whole = sum(p.numel() for p in module.parameters())
    units = sum(type(m).__name__.startswith("FSDP") for m in module.modules())
    return {"local": local, "whole": whole, "units": units}


def no_shard_is_ddp() -> dict[str, Any]:
    config = FSDPStrategyConfig(sharding_strategy="NO_SHARD")
    one = weights(pair(build_fsdp2(config, context(config)), Net)[0])
    other = weights(pair(ddp(), Net)[0])
    return {"equal": all(torch.equal(one[name], other[name]) for name in other), "compared": len(other)}


def called_outside() -> dict[str, float]:
    """The module itself after a fit and after a validation, on all ranks together: with full weights."""
    module, loop = pair(fsdp2(), Net, max_epochs=1)
    plain, x = Net(), data.tensors[0]
    plain.load_state_dict({name: value.float() for name, value in weights(module).items()})
    with torch.no_grad():
        first = float((module(x) - plain(x)).abs().max())
        loop.validate(module, share(), verbose=False)
        return {"after_fit": first, "after_validation": float((module(x) - plain(x)).abs().max())}


def low_precision(mode: str) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        # Adam's default eps of 1e-8 is zero in float16.
        module, _ = pair(fsdp2(), lambda: Net(eps=1e-4), precision=mode)
        dtype = str(module.head.weight.dtype)
        moved = apart(weights(seeded(Net, 100)), weights(module))
        return {"dtype": dtype, "sharded": is_parallelised(module), "moved": moved}

    return run


def fsdp2_resume() -> dict[str, Any]:
    folder = [tempfile.mkdtemp()] if rank == 0 else [None]
    straight = weights(pair(fsdp2(), Net, max_epochs=3)[0])
    dist.broadcast_object_list(folder)
    _, loop = pair(fsdp2(), Net, max_epochs=1)
    path = Path(str(folder[0])) / "one.ckpt"
    loop.save_checkpoint(path)
    resumed = seeded(Net, 500 + rank)
    trainer(fsdp2(), max_epochs=3).fit(resumed, share(), ckpt_path=path)
    plain = torch.load(path, weights_only=True)["state_dict"] if rank == 0 else {}
    return {
        "apart": apart(straight, weights(resumed)),
        "one_file": path.is_file(),
        "plain_tensors": (all(type(t) is Tensor for t in plain.values()) and len(plain) > 0) or rank != 0,
    }


def fsdp2_test_then_fit() -> dict[str, Any]:
    module = seeded(Net, 100 + rank)
    loop = trainer(fsdp2(), limit_val_batches=1.0)
    before = loop.validate(module, share(), verbose=False)[0]["val"]
    loop = trainer(fsdp2(), limit_val_batches=1.0)
    loop.fit(module, share())
    after = loop.validate(module, share(), verbose=False)[0]["val"]
    return {"before": before, "after": after, "hook_left": "configure_model" in vars(module)}


def fsdp2_fabric() -> dict[str, Any]:
    def train(step: Callable[[Any, Tensor], None], module: nn.Module, optimizer: Any, rows: slice) -> None:
        for start in range(0, 32, 8):
            x, y = (t[start : start + 8][rows] for t in data.tensors)
            step(nn.functional.mse_loss(module(x), y), x)
            optimizer.step()
            optimizer.zero_grad()

    plain = seeded(Net, 100)
    optimizer: Any = torch.optim.Adam(plain.parameters(), lr=0.02)
    train(lambda loss, _: loss.backward(), plain, optimizer, slice(None))
    config = FSDP2StrategyConfig()
    strategy: Any = build_fsdp2(config, context(config, "fabric"))
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=2, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    module = fabric.setup_module(seeded(Net, 100 + rank))
    optimizer = fabric.setup_optimizers(torch.optim.Adam(module.parameters(), lr=0.02))
    train(lambda loss, _: fabric.backward(loss), module, optimizer, slice(rank, None, 2))
    return {"apart": apart(weights(plain), weights(module.module)), "sharded": is_parallelised(module)}


def fsdp2_fabric_goes_on() -> dict[str, Any]:
    """From what one process saved whose optimizer has the last parameters first."""

    def adam(module: nn.Module) -> torch.optim.Optimizer:
        first, *rest = module.parameters()
        groups: list[dict[str, Any]] = [{"params": rest[::-1], "lr": 0.01}, {"params": [first]}]
        return torch.optim.Adam(groups, lr=0.02)

    def train(step: Callable[[Any], None], module: nn.Module, optimizer: Any, rows: slice) -> None:
        x, y = (t[:8][rows] for t in data.tensors)
        for _ in range(3):
            step(nn.functional.mse_loss(module(x), y))
            optimizer.step()
            optimizer.zero_grad()

    plain = seeded(Net, 100)
    optimizer: Any = adam(plain)
    train(lambda loss: loss.backward(), plain, optimizer, slice(None))
    path = Path(tempfile.gettempdir(), f"fabric-{os.environ['MASTER_PORT']}-{rank}.ckpt")
    torch.save({"model": plain.state_dict(), "adam": optimizer.state_dict(), "epoch": 3, "more": 1}, path)
    train(lambda loss: loss.backward(), plain, optimizer, slice(None))
    config = FSDP2StrategyConfig()
    strategy: Any = build_fsdp2(config, context(config, "fabric"))
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=2, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    module = fabric.setup_module(seeded(Net, 100 + rank))
    optimizer = fabric.setup_optimizers(adam(module))
    state = {"model": module, "adam": optimizer, "epoch": 0}
    left = fabric.load(path, state)
    train(fabric.backward, module, optimizer, slice(rank, None, 2))
    found = {"apart": apart(weights(plain), weights(module.module)), "epoch": state["epoch"], "left": left}
    path.unlink()
    path = Path(fabric.broadcast(str(path)))
    fabric.save(path, state)  # one file, in which the optimizer's state has names
    train(fabric.backward, module, optimizer, slice(rank, None, 2))
    again = fabric.setup_module(seeded(Net, 200 + rank))
    optimizer = fabric.setup_optimizers(adam(again))
    fabric.load(path, {"model": again, "adam": optimizer, "epoch": 0})
    train(fabric.backward, again, optimizer, slice(rank, None, 2))
    fabric.barrier()
    path.unlink(missing_ok=True)
    return {**found, "own": apart(weights(module.module), weights(again.module))}


def refused(make: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        try:
            make()
        except (ConfigError, ValueError, TypeError, RuntimeError) as error:
            return {"error": type(error).__name__, "text": str(error)}
        return {"error": None, "text": ""}

    return run


def sync_batchnorm() -> dict[str, Any]:
    config = TorchSyncBatchNormLayerSyncConfig()
    results = {}
    for name, strategy in (("ddp", ddp), ("fsdp2", fsdp2)):
        layer_sync = build_sync_batchnorm(config, context(DDPStrategyConfig()))
        reference = single(lambda: Net(norm=True))
        module, _ = pair(strategy(), lambda: Net(norm=True), plugins=[layer_sync])
        final = weights(module)
        running = [n for n in final if "running" in n]
        results[name] = apart(reference, final)
        results[f"{name}_running"] = apart({n: reference[n] for n in running}, {n: final[n] for n in running})
    alone, _ = pair(ddp(), lambda: Net(norm=True))
    results["without"] = apart(reference, weights(alone))
    return results


SCENARIOS: dict[str, Callable[[], Any]] = {
    "ddp": lambda: compare(ddp(), gradient_clip_val=0.05),
    "ddp_view_static": lambda: compare(ddp(gradient_as_bucket_view=True, static_graph=True)),
    "ddp_unused": lambda: compare(ddp(find_unused_parameters=True), Branching),
    "ddp_buckets": ddp_buckets,
    "ddp_accumulate": ddp_accumulate,
    "ddp_options": lambda: compare(ddp(broadcast_buffers=False, find_unused_parameters=True), Branching),
    "ddp_fp16": lambda: ddp_hook(ddp_comm_hook="fp16"),
    "ddp_powersgd": lambda: ddp_hook(ddp_comm_hook="powersgd", powersgd_rank=2, powersgd_start_iter=2),
    "ddp_fp16_fabric": ddp_hook_fabric,
    "fsdp2": lambda: compare(fsdp2()),
    "fsdp2_direct": lambda: compare(fsdp2(), lambda: Net(direct=True)),
    "fsdp2_manual": lambda: compare(fsdp2(), lambda: Net(manual=True)),
    "fsdp2_configure_model": lambda: compare(fsdp2(), Configured),
    "fsdp2_own": lambda: compare(fsdp2(), Own),
    "fsdp2_own_layer_sync": refused(
        lambda: pair(
            fsdp2(),
            Own,
            plugins=[build_sync_batchnorm(TorchSyncBatchNormLayerSyncConfig(), context(DDPStrategyConfig()))],
        )
    ),
    "fsdp2_keep": lambda: compare(fsdp2(reshard_after_forward=False, auto_wrap_policy=["torch.nn:Linear"])),
    "fsdp2_accumulate": lambda: compare(fsdp2(), accumulate_grad_batches=2),
    "fsdp2_clip_norm": lambda: compare(fsdp2(), gradient_clip_val=0.05),
    "fsdp2_clip_value": lambda: compare(fsdp2(), gradient_clip_val=0.001, gradient_clip_algorithm="value"),
    "fsdp2_bytes": sharded_bytes,
    "fsdp2_called_outside": called_outside,
    "no_shard_is_ddp": no_shard_is_ddp,
    "fsdp2_resume": fsdp2_resume,
    "fsdp2_validate": fsdp2_test_then_fit,
    "fsdp2_fabric": fsdp2_fabric,
    "fsdp2_fabric_goes_on": fsdp2_fabric_goes_on,
    "fsdp2_tensor": refused(lambda: pair(fsdp2(tensor=2), Net)),
    **{f"fsdp2_{mode}": low_precision(mode) for mode in ("bf16-mixed", "bf16-true", "16-true")},
    **{
        f"fsdp2_{mode}": refused(functools.partial(trainer, fsdp2(), precision=mode))
        for mode in ("64-true", "16-mixed", "transformer-engine")
    },
    "sync_batchnorm": sync_batchnorm,
    "torch_sync_batchnorm": refused(lambda: nn.SyncBatchNorm(3)(torch.randn(4, 3))),
    "ddp_bf16_hook": refused(lambda: pair(ddp(ddp_comm_hook="bf16"), Net)),
    "ddp_unused_refused": refused(lambda: pair(ddp(), Branching)),
}


def main(out: Path, only: list[str]) -> None:
    """Runs the scenarios on this rank."""
    results: dict[str, Any] = {}
    for name, scenario in SCENARIOS.items():
        if only and name not in only:
            continue
        try:
            results[name] = scenario()
        except Exception as error:
            # The other rank would wait in a collective; the test shows this text instead.
            results[name] = {"failed": traceback.format_exc()}
            print(f"rank {rank}: {name}: {error!r}", file=sys.stderr)
        if dist.is_initialized():
            dist.barrier()
    if rank == 0:
        out.write_text(json.dumps(results))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

"""What ranks do under DeepSpeed, one thing after another in one start, for `test_strategies_deepspeed.py`."""

from __future__ import annotations

import importlib
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch._inductor.compile_fx  # DeepSpeed would import it in each rank, for more than a second
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fairlead import PluginManager, TrainerConfig
from fairlead.errors import FairleadError
from fairlead.open_union import parse_backend
from fairlead_strategies import TorchSyncBatchNormLayerSyncConfig
from fairlead_strategies.deepspeed.runtime import build
from fairlead_strategies.sync_batchnorm_runtime import build as build_sync_batchnorm

Outcome = dict[str, Any]
LITERALS = (
    "deepspeed",
    "deepspeed_stage_2",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3",
    "deepspeed_stage_3_offload",
)
SMALL = {"stage3_param_persistence_threshold": 0}
"""Else stage 3 keeps parameters as small as these whole on every rank."""


class Net(pl.LightningModule):
    """A small network that keeps its losses, and its gradients before each step."""

    def __init__(self, *, manual: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.inlet = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12) if norm else nn.Identity()
        self.frozen = nn.Linear(12, 12)
        self.head = nn.Linear(12, 2)
        self.frozen.requires_grad_(False)
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.norms: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
        x, y = (part.to(self.head.weight.dtype) for part in batch)
        loss = nn.functional.mse_loss(self.head(torch.tanh(self.frozen(self.norm(self.inlet(x))))), y)
        self.losses.append(float(loss))
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss / 2)
        if index % 2 == 1:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        if hasattr(strategy, "full_gradients"):
            if self.automatic_optimization:  # else a step ends the adding up: there are none before it
                self.gradients.append(strategy.full_gradients())
        else:
            self.gradients.append({n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None})

    def on_train_batch_end(self, *_: Any) -> None:
        engine: Any = self.trainer.model
        norm = getattr(engine, "get_global_grad_norm", lambda: None)()
        if norm is not None and self.trainer.global_step > len(self.norms):
            self.norms.append(float(norm))  # of this step, before clipping

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        if isinstance(self.norm, nn.Identity):
            return torch.optim.Adam(trained, lr=0.02)
        # Before a batch normalisation the gradient of a bias is rounding alone, which Adam would make a step of.
        return torch.optim.SGD(trained, lr=0.1)


class Even(pl.LightningModule):
    """Weights that two ranks can share without cutting one: stage 2 keeps the gradient of a cut one whole on both."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 16, bias=False)
        self.blocks = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(2)])
        self.head = nn.Linear(16, 6, bias=False)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = batch[0].to(self.head.weight.dtype)
        loss: Tensor = self.head(torch.tanh(self.blocks(self.inlet(x)))).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


_generator = torch.Generator().manual_seed(7)
DATA = TensorDataset(torch.randn(40, 6, generator=_generator), torch.randn(40, 2, generator=_generator))
"""Five global batches of eight: with two to a step, one is left over in every epoch."""


def net(seed: int, **kwargs: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**kwargs)


def strategy(name: str, engine: str = "trainer", **fields: Any) -> Any:
    fields |= SMALL if "stage_3" in name else {}
    config: Any = parse_backend("strategy", {"name": name, **fields}, PluginManager())
    asked = TrainerConfig(accumulate_grad_batches=2, gradient_clip_val=0.05) if "config" in fields else TrainerConfig()
    return build(config, importlib.import_module("ranks").context(config, engine, trainer=asked))


def trainer(chosen: Any, **kwargs: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options: Any = {"enable_checkpointing": False, "max_epochs": 2, **quiet, **kwargs, "use_distributed_sampler": False}
    if chosen is None:
        return pl.Trainer(accelerator="cpu", devices=1, **options)
    plugins = [TorchElasticEnvironment(), *options.pop("plugins", [])]
    return pl.Trainer(accelerator="cpu", devices=dist.get_world_size(), strategy=chosen, plugins=plugins, **options)


def loader(rank: int | None) -> DataLoader[Any]:
    """The whole batches, or a rank's half of each."""
    if rank is None:
        return DataLoader(DATA, batch_size=8)
    world = dist.get_world_size()
    sampler = DistributedSampler(DATA, world, rank, shuffle=False)  # type: ignore[var-annotated]
    return DataLoader(DATA, batch_size=8 // world, sampler=sampler)


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys(), (a.keys(), b.keys())
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def fit(
    rank: int, chosen: Any, module: pl.LightningModule, resumed: Path | None = None, **kwargs: Any
) -> dict[str, Tensor]:
    """Trains on both ranks; the whole weights."""
    loop = trainer(chosen, **kwargs)
    loop.fit(module, loader(rank), ckpt_path=resumed, weights_only=False)
    weights: dict[str, Tensor] = chosen.full_parameters()
    return weights


def compare(rank: int, name: str, make: dict[str, Any] | None = None, **kwargs: Any) -> Outcome:
    """Two ranks against one process with the whole batch; rank 1 starts from other weights."""
    fields, alone = kwargs.pop("fields", {}), {k: v for k, v in kwargs.items() if k not in ("plugins", "precision")}
    reference = net(100, **(make or {}))
    trainer(None, **alone).fit(reference, loader(None))
    expected = {n: p.detach() for n, p in reference.named_parameters()}
    module = net(100 + rank, **(make or {}))
    weights = fit(rank, strategy(name, **fields), module, **kwargs)
    norms = [float(torch.stack([g.norm() for g in one.values()]).norm()) for one in reference.gradients]
    steps = len(reference.gradients)
    return {
        "weights": apart(expected, weights),
        "moved": apart({n: p.detach() for n, p in net(100, **(make or {})).named_parameters()}, weights),
        "gradients": max(
            (apart(a, b) for a, b in zip(reference.gradients, module.gradients, strict=False)), default=0.0
        ),
        "largest": max(norms),
        "smallest": min(norms),
        "norm": max((abs(a - b) for a, b in zip(norms, module.norms, strict=False)), default=0.0),
        "steps": (steps, len(module.gradients), len(module.norms)),
        "losses": (reference.losses, module.losses),
        "dtype": str(module.head.weight.dtype),
    }


def resume(rank: int, name: str, folder: Path, **kwargs: Any) -> Outcome:
    """One run of two epochs against one that is begun again after the first."""
    kwargs["gradient_clip_val"] = 0.05
    straight = fit(rank, strategy(name), net(100 + rank), **kwargs)
    first = strategy(name)
    module = net(100 + rank)
    loop = trainer(first, max_epochs=1, **kwargs)
    loop.fit(module, loader(rank))
    early = first.full_parameters()
    loop.save_checkpoint(folder / name)  # of all ranks together
    again = fit(rank, strategy(name), net(500 + rank), resumed=folder / name, **kwargs)
    return {
        "equal": all(map(torch.equal, straight.values(), again.values())),
        "apart": apart(straight, again),
        "moved": apart(early, again),
        "saved": early,
        "files": sorted(path.name for path in (folder / name / "checkpoint").iterdir()),
    }


def held(rank: int, name: str) -> Outcome:
    """The bytes of the tensors that this rank keeps, by kind, and the number of weights of the whole model.

    Between two batches of one step, for only there the first two stages differ: stage 1 adds up whole gradients.
    """
    chosen, module, sizes = strategy(name), Even(), dict[str, int]()

    class Look(pl.Callback):
        def on_train_batch_end(self, loop: pl.Trainer, *_: Any) -> None:
            if loop.global_step == 1 and "gradients" not in sizes:
                sizes["gradients"] = 0  # of the step that is over; the next batch is only added up
            elif loop.global_step == 1:
                sizes.update(by_kind(chosen.deepspeed_engine))

    loop = trainer(chosen, max_epochs=1, precision="bf16-mixed", accumulate_grad_batches=2, callbacks=[Look()])
    loop.fit(module, loader(rank))
    return {"whole": sum(p.numel() for p in Even().parameters()), **sizes}


def by_kind(engine: Any) -> dict[str, int]:
    """Bytes of the memory behind what DeepSpeed keeps from batch to batch; parts of one buffer are counted once."""
    optimizer = engine.optimizer
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    if engine.zero_optimization_stage() == 3:
        parameters = [p.ds_tensor for p in trained]
        master = optimizer.fp32_partitioned_groups_flat
        gradients = list(optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.values())
    else:
        parameters, master = trained, optimizer.single_partition_of_fp32_groups
        gradients = [p.grad for p in trained if p.grad is not None]
        gradients += [g for group in optimizer.all_grad_tensors.values() for g in group or () if g is not None]
        gradients += [g for group in optimizer.averaged_gradients.values() for g in group or () if g is not None]
    states = [v for state in optimizer.optimizer.state.values() for v in state.values() if v.numel() > 1]
    kinds = {"parameters": parameters, "master": master, "gradients": gradients, "moments": states}
    return {kind: bytes_of(tensors) for kind, tensors in kinds.items()}


def bytes_of(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def fabric(rank: int) -> Outcome:
    """A loop of one's own."""
    reference = net(100)
    optimizer = reference.configure_optimizers()
    for start in range(0, 40, 8):
        optimizer.zero_grad()
        x, y = DATA[start : start + 8]
        nn.functional.mse_loss(reference.head(torch.tanh(reference.frozen(reference.inlet(x)))), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    chosen = strategy("deepspeed_stage_2", "fabric")
    run = Fabric(accelerator="cpu", devices=2, strategy=chosen, plugins=[TorchElasticEnvironment()])
    run.launch()
    layers = net(100 + rank)
    model = nn.Sequential(layers.inlet, layers.frozen, nn.Tanh(), layers.head)
    engine, stepper = run.setup(model, torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.02))
    asked = 0
    for start in range(0, 40, 8):
        x, y = (part[rank::2] for part in DATA[start : start + 8])
        run.backward(nn.functional.mse_loss(engine(x), y))
        asked += len(chosen.full_gradients())
        stepper.step()
        stepper.zero_grad()
    names = {"0": "inlet", "1": "frozen", "3": "head"}
    found = {f"{names[n[0]]}{n[1:]}": p for n, p in chosen.full_parameters().items()}
    return {"weights": apart({n: p.detach() for n, p in reference.named_parameters()}, found), "asked": asked}


def too_early(rank: int) -> Outcome:
    """Gradients are asked for behind the step."""
    chosen = strategy("deepspeed_stage_2")
    fit(rank, chosen, net(100))
    try:
        chosen.full_gradients()
    except FairleadError as error:
        return {"error": str(error)}
    return {"error": None}


def table(rank: int, folder: Path) -> dict[str, Callable[[], Outcome]]:
    step: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    own = {
        "config": {
            "zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2, "gradient_clipping": 0.05,
            "train_micro_batch_size_per_gpu": "auto",
        }
    }  # fmt: skip
    batchnorm = build_sync_batchnorm(
        TorchSyncBatchNormLayerSyncConfig(), importlib.import_module("ranks").context(strategy_config())
    )
    return {
        **{name: lambda name=name: compare(rank, name, **step) for name in LITERALS},  # type: ignore[misc]
        "stage_0": lambda: compare(rank, "deepspeed", fields={"stage": 0}, **step),
        "each_batch": lambda: compare(rank, "deepspeed"),
        "own_config": lambda: compare(rank, "deepspeed", fields=own, **step),
        "manual_1": lambda: compare(rank, "deepspeed", {"manual": True}),
        "manual_2": lambda: compare(rank, "deepspeed_stage_2", {"manual": True}),
        "manual_3": lambda: compare(rank, "deepspeed_stage_3", {"manual": True}),
        "bf16_2": lambda: compare(rank, "deepspeed_stage_2", precision="bf16-mixed"),
        "bf16_3": lambda: compare(rank, "deepspeed_stage_3", precision="bf16-true"),
        "batchnorm": lambda: compare(rank, "deepspeed", {"norm": True}, plugins=[batchnorm]),
        "fabric": lambda: fabric(rank),
        "too_early": lambda: too_early(rank),
        **{f"resume_{name}": lambda name=name: resume(rank, name, folder) for name in LITERALS},  # type: ignore[misc]
        "resume_bf16": lambda: resume(rank, "deepspeed_stage_2", folder / "bf16", precision="bf16-mixed"),
        **{f"held_{n}": lambda n=n: held(rank, f"deepspeed_stage_{n}") for n in (1, 2, 3)},  # type: ignore[misc]
    }


def strategy_config() -> Any:
    return parse_backend("strategy", "deepspeed", PluginManager())


def everything(rank: int, folder: str, only: tuple[str, ...] = ()) -> dict[str, Outcome]:
    """All of the table on this rank; what failed is in its place, and the other rank may then fail too."""
    sys.path.insert(0, str(Path(__file__).parent))
    warnings.simplefilter("ignore")  # of DeepSpeed and Lightning, about each other
    found: dict[str, Outcome] = {}
    for name, run in table(rank, Path(folder)).items():
        if only and name not in only:
            continue
        try:
            found[name] = run()
        except Exception:
            found[name] = {"failed": traceback.format_exc()}
    return found

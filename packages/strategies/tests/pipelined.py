"""What ranks of a pipeline run in the tests, and what one process makes of the same: `run_ranks(training, ...)`."""

from __future__ import annotations

import importlib
import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fairlead_strategies import HybridStrategyConfig, PipelineParallelStrategyConfig
from fairlead_strategies.mesh_build import build

mixtures: Any = importlib.import_module("expert_runs")  # beside this file
PADDING, VOCABULARY, TIME = -100, 11, 4


class Block(nn.Module):
    """A residual block that lets through another width than it takes."""

    def __init__(self, width: int, out: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, out)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return out + x[..., : out.shape[-1]] if out.shape[-1] <= x.shape[-1] else out


class Head(nn.Module):
    """The embedding is the output matrix as well."""

    def __init__(self, norm: nn.Module, embedding: nn.Embedding) -> None:
        super().__init__()
        self.norm, self.embedding = norm, embedding

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(x), self.embedding.weight)


class Tokens(pl.LightningModule):
    """A token model with tied weights, other widths between its layers, and a loss over the tokens that count."""

    def __init__(self, weigh: bool = True, dropout: float = 0.0, widths: tuple[int, ...] = (8, 12, 6, 8, 8)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, widths[0])
        self.blocks = nn.ModuleList(Block(a, b, dropout) for a, b in itertools.pairwise(widths))
        self.norm = nn.LayerNorm(widths[-1])
        self.losses: list[float] = []
        self.logged: list[float] = []
        if weigh:
            self.pipeline_weight = lambda target: (target != PADDING).sum()

    def pipeline_layers(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, Head(self.norm, self.embedding)]

    def pipeline_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PADDING)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.pipeline_layers():
            x = layer(x)
        return x

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = self.pipeline_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val", self.pipeline_loss(self(batch[0]), batch[1]), batch_size=len(batch[0]))

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        out: Tensor = self(batch[0])
        return out.argmax(-1)

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim < 2]
        first: Any = self.blocks[0]
        assert first.up.weight.ndim == 2  # names of any layer are there, on every rank
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-5)  # noise is no step where gradients vanish
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]


class Positioned(nn.Module):
    """An embedding of tokens and of their positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.table = nn.Parameter(torch.randn(TIME, width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.embedding(x) + self.table[: x.shape[1]]
        return out


class Attending(Tokens):
    """Attention in both halves, and positions; its output matrix is its own."""

    def __init__(self) -> None:
        super().__init__()
        del self.embedding
        self.inlet = Positioned(12)
        blocks = [mixtures.mesh_runs.Attention(), Block(12, 12), mixtures.mesh_runs.Attention(), Block(12, 12)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, VOCABULARY)

    def pipeline_layers(self) -> list[nn.Module]:
        return [self.inlet, *self.blocks, self.norm, self.head]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-5)


class Mixed(Attending):
    """Mixtures of experts in both halves, and a layer without."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1], self.blocks[3] = mixtures.MixtureBlock(), mixtures.MixtureBlock()


class Plain(pl.LightningModule):
    """One nn.Sequential, and a loss that is a mean over samples: nothing more has to be said."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(TIME, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def pipeline_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x, y = batch[0] / VOCABULARY, batch[1][:, :3].clamp(min=0) / VOCABULARY
        loss = self.pipeline_loss(self(x), y)
        self.losses.append(float(loss.detach()))
        return 0.5 * loss  # what is done to the loss afterwards counts

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def dataset() -> TensorDataset:
    """44 samples: batches of 16 leave a short last one. Rows differ much in how many tokens count."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randint(0, VOCABULARY, (44, TIME), generator=generator)
    y = torch.randint(0, VOCABULARY, (44, TIME), generator=generator)
    for row in range(44):
        y[row, 1 + row % TIME :] = PADDING
    return TensorDataset(x, y)


def config(hybrid: bool = False, **fields: Any) -> Any:
    return (HybridStrategyConfig if hybrid else PipelineParallelStrategyConfig)(**fields)


def strategy(chosen: Any, world_size: int) -> Any:
    ranks: Any = importlib.import_module("ranks")
    return build(chosen, ranks.context(chosen, world_size=world_size))


def trainer(chosen: Any = None, **kwargs: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"enable_checkpointing": False, "max_epochs": 2, "limit_val_batches": 0, **quiet, **kwargs}
    options["use_distributed_sampler"] = False
    if chosen is None:
        return pl.Trainer(accelerator="cpu", devices=1, **options)
    world = dist.get_world_size()
    return pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy(chosen, world),
        plugins=[TorchElasticEnvironment()],
        **options,
    )


def loader(made: pl.Trainer | None = None, batch_size: int = 16) -> DataLoader[Any]:
    """The whole batches, or this replica's part of each."""
    data = dataset()
    if made is None or made.distributed_sampler_kwargs is None:
        return DataLoader(data, batch_size=batch_size)
    parts = made.distributed_sampler_kwargs
    sampler: DistributedSampler[Any] = DistributedSampler(data, **parts, shuffle=False)
    return DataLoader(data, batch_size=batch_size // int(parts["num_replicas"]), sampler=sampler)


def seeded(make: Callable[[], Any], seed: int = 100) -> Any:
    torch.manual_seed(seed)
    return make()


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().double().clone() for name, one in module.named_parameters()}


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert list(a) == list(b), (list(a), list(b))
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def single(make: Callable[[], Any], **kwargs: Any) -> Any:
    """The reference: one process with the whole batches, and rank 0's initial weights."""
    module = seeded(make)
    trainer(**kwargs).fit(module, loader())
    return module


def compare(chosen: Any, make: Callable[[], Any] = Tokens, **kwargs: Any) -> dict[str, Any]:
    """A pipeline of all ranks against one process."""
    reference = single(make, **kwargs)
    module = seeded(make, 100 + dist.get_rank())  # rank 0's weights are to win
    made = trainer(chosen, **kwargs)
    made.fit(module, loader(made))
    found = made.strategy.full_parameters()  # type: ignore[attr-defined]
    ours = {name: found[name].double() for name in weights(reference)}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, module.losses)
    losses = torch.tensor(gathered, dtype=torch.float64).mean(0)
    return {
        "apart": apart(weights(reference), ours),
        "moved": apart(weights(seeded(make)), ours),
        "losses": float((losses - torch.tensor(reference.losses, dtype=torch.float64)).abs().max()),
        "own": len(list(module.parameters())),
        "whole": len(ours),
        "name": made.strategy.name,  # type: ignore[attr-defined]
    }


def gradients(chosen: Any, make: Callable[[], Any] = Tokens) -> dict[str, Any]:
    """Every gradient of the first step, before the optimizer changes anything."""
    found: dict[str, Tensor] = {}

    class Look(pl.Callback):
        def on_before_optimizer_step(self, made: pl.Trainer, *_: Any) -> None:
            whole = getattr(made.strategy, "full_gradients", None)
            named: Any = made.lightning_module.named_parameters()
            found.update(whole() if whole is not None else {n: p.grad.clone() for n, p in named})

    reference = seeded(make)
    trainer(max_steps=1, callbacks=[Look()]).fit(reference, loader())
    expected, found = found, {}
    # What was found must not be changed by the clipping that follows.
    made = trainer(chosen, max_steps=1, callbacks=[Look()], gradient_clip_val=1e-3)
    made.fit(seeded(make), loader(made))
    return {
        "apart": apart(expected, {name: found[name] for name in expected}),
        "least": min(float(one.abs().max()) for one in expected.values()),
    }


def checkpoint(chosen: Any, make: Callable[[], Any] = Tokens) -> dict[str, Any]:
    """Saves after an epoch and its validation, and goes on from there: as a pipeline, and in one process."""
    validated = {"limit_val_batches": 1.0}
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    path, alone = Path(str(box[0])) / "pipeline.ckpt", Path(str(box[0])) / "one.ckpt"
    made = trainer(chosen, max_epochs=2, **validated)
    made.fit(seeded(make), loader(made), loader(made))
    straight = made.strategy.full_parameters()  # type: ignore[attr-defined]
    made = trainer(chosen, max_epochs=1, **validated)
    made.fit(seeded(make), loader(made), loader(made))
    made.save_checkpoint(path)
    made = trainer(chosen, max_epochs=2, **validated)
    made.fit(seeded(make, 555), loader(made), loader(made), ckpt_path=path)
    resumed = made.strategy.full_parameters()  # type: ignore[attr-defined]
    one = seeded(make, 556)
    trainer(max_epochs=2, **validated).fit(one, loader(), loader(), ckpt_path=path)
    reference = seeded(make)
    first = trainer(max_epochs=1, **validated)
    first.fit(reference, loader(), loader())
    if dist.get_rank() == 0:
        first.save_checkpoint(alone)
    dist.barrier()
    made = trainer(chosen, max_epochs=2, **validated)
    made.fit(seeded(make, 557), loader(made), loader(made), ckpt_path=alone)
    back = made.strategy.full_parameters()  # type: ignore[attr-defined]
    ours, theirs = torch.load(path, weights_only=True), torch.load(alone, weights_only=True)
    states = [c["optimizer_states"][0] for c in (ours, theirs)]
    return {
        "resumed": apart(straight, resumed),
        "in_one_process": apart(straight, {n: weights(one)[n] for n in straight}),
        "from_one_process": apart(straight, back),
        "same_keys": list(ours["state_dict"]) == list(theirs["state_dict"]),
        "same_groups": states[0]["param_groups"] == states[1]["param_groups"],
        "same_numbers": list(states[0]["state"]) == list(states[1]["state"]),
        "moments": max(
            float((a["exp_avg"] - states[1]["state"][n]["exp_avg"]).abs().max()) for n, a in states[0]["state"].items()
        ),
    }


def evaluations(chosen: Any, make: Callable[[], Any] = Tokens) -> dict[str, Any]:
    """Validation before and after, prediction, and a call on all ranks, against one process."""
    reference = seeded(make)
    alone = trainer(limit_val_batches=1.0)
    before = alone.validate(reference, loader(), verbose=False)[0]["val"]
    module = seeded(make)
    made = trainer(chosen, limit_val_batches=1.0)
    mine = made.validate(module, loader(made), verbose=False)[0]["val"]
    made = trainer(chosen, limit_val_batches=1.0)
    made.fit(module, loader(made), loader(made))  # the module is split already
    alone = trainer(limit_val_batches=1.0)
    alone.fit(reference, loader(), loader())
    predicted: Any = trainer(chosen).predict(module, loader())
    expected: Any = trainer().predict(reference, loader())
    whole = made.strategy.full_parameters()  # type: ignore[attr-defined]
    with torch.no_grad():
        called = float((module(dataset()[:3][0]) - reference(dataset()[:3][0])).abs().max())
    return {
        "before": abs(mine - before),
        "after": abs(float(made.callback_metrics["val"]) - float(alone.callback_metrics["val"])),
        "fell": before - float(alone.callback_metrics["val"]),
        "predicted": all(bool((a == b).all()) for a, b in zip(predicted, expected, strict=True)),
        "called": called,
        "weights": apart(weights(reference), {name: whole[name] for name in weights(reference)}),
    }


class Manual(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Silent(Plain):
    pipeline_loss = None  # type: ignore[assignment]


class Loose(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def pipeline_layers(self) -> list[nn.Module]:
        return list(self.net)


class Uses(Plain):
    def training_step(self, batch: list[Tensor]) -> Tensor:
        out: Tensor = self(batch[0] / VOCABULARY).mean()
        return out


class Forgets(Plain):
    def training_step(self, batch: list[Tensor]) -> Tensor:
        return torch.zeros((), requires_grad=True) * 1


class LineSearch(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def refusals() -> dict[str, str]:
    """What is said of modules and settings that cannot work, on this rank."""
    cases: dict[str, tuple[Any, Callable[[], Any]]] = {
        "manual": (config(), Manual),
        "silent": (config(), Silent),
        "loose": (config(), Loose),
        "uses": (config(), Uses),
        "forgets": (config(), Forgets),
        "lbfgs": (config(), LineSearch),
        "unweighed": (config(), lambda: Tokens(weigh=False)),
        "stages": (config(schedule="interleaved_1f1b", stages_per_rank=3), Plain),
        "counts": (config(split=[1, 2]), Plain),
        "names": (config(split=["net.9"]), Plain),
    }
    said = {}
    for name, (chosen, make) in cases.items():
        said[name] = _error(partial(_fit, chosen, make))
    said["batches"] = _error(lambda: _fit(config(), Plain, shift=dist.get_rank()))
    return said


def _fit(chosen: Any, make: Callable[[], Any], shift: int = 0) -> None:
    made = trainer(chosen, max_steps=1)
    samples: Any = [dataset()[i] for i in range(shift, 44)]
    made.fit(seeded(make), DataLoader(samples, batch_size=8))


def _error(run: Callable[[], None]) -> str:
    try:
        run()
    except Exception as error:
        block = getattr(error, "block", None)
        return block() if block is not None else f"{type(error).__name__}: {error}"
    return ""


def dropout(chosen: Any) -> dict[str, Any]:
    """Whether two stages draw the same masks, and whether loaders would draw the same afterwards."""
    masks: list[Tensor] = []
    module = seeded(lambda: Tokens(dropout=0.5, widths=(8, 8, 8, 8, 8)))
    made = trainer(chosen, max_steps=3)
    for block in module.blocks:
        block.dropout.register_forward_hook(lambda *x: masks.append(x[2] == 0))
    made.fit(module, loader(made))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (masks[0], torch.get_rng_state()))
    return {
        "same_masks": bool((everyone[0][0] == everyone[1][0]).all()),
        "same_generator": bool((everyone[0][1] == everyone[1][1]).all()),
        "finite": all(loss == loss for loss in module.losses),
    }

"""What ranks do to go on from what another number of ranks saved, for `test_strategies_deepspeed_other_ranks.py`."""

from __future__ import annotations

import shutil
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed_runs import DATA, Net, loader, net, strategy, trainer
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn

from fairlead.errors import CheckpointError

Outcome = dict[str, Any]
BF16 = {"precision": "bf16-true"}


def own(zero: dict[str, Any], **others: Any) -> dict[str, Any]:
    """DeepSpeed's own configuration, for what is no field."""
    return {"config": {"zero_optimization": zero, "zero_allow_untested_optimizer": True, **others}}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "1": ("deepspeed", {}, {}),
    "2": ("deepspeed", own({"stage": 2, "round_robin_gradients": True, "parameter_alignment": True}), {}),
    "2_offload": ("deepspeed_stage_2_offload", {}, {}),
    "3": ("deepspeed", {"stage": 3, "sub_group_size": 20}, {}),
    "3_offload": ("deepspeed_stage_3_offload", {}, {}),
    "1_bf16": ("deepspeed", own({"stage": 1}, data_types={"grad_accum_dtype": "fp32"}), BF16),
    "2_bf16": ("deepspeed_stage_2", {}, BF16),
}
"""The strategy, fields of it, and arguments of the trainer.

`round_robin_gradients` orders the parameters by the number of ranks, and `sub_group_size` cuts the groups of stage 3
anew; there, without the offloading one's threshold of 0, all parameters are small enough to be whole on each rank. With
`grad_accum_dtype` DeepSpeed takes another optimizer for stage 1.
"""


EVALUATED = ("2", "3", "3_offload")


class Grouped(Net):
    """Two groups, the first with what comes last in the network, and a rate that falls within each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.tested: list[Tensor] = []

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.tested.append(self.head(torch.tanh(self.frozen(self.inlet(batch[0])))).detach())

    def configure_optimizers(self) -> Any:
        groups: Any = [{"params": self.head.parameters(), "weight_decay": 0.0}, {"params": self.inlet.parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class AllTrained(Grouped):
    """Nothing is frozen."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.requires_grad_().parameters())


class Look(pl.Callback):
    """Notes the whole state before the first step, and may then forget the moments."""

    def __init__(self, *, forget: bool) -> None:
        self.forget = forget
        self.found: Outcome = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found = state(trainer, pl_module)
        if self.forget:
            for tensor in (t for states in trainer.optimizers[0].state.values() for t in states.values()):
                tensor.zero_()


def state(loop: pl.Trainer, module: pl.LightningModule) -> Outcome:
    """Weights and both moments, whole, and rates and numbers of steps; all ranks must call it."""
    optimizer: Any = loop.optimizers[0]
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False  # DeepSpeed links moments behind the step of the first group only
        optimizer._lazy_init_hp_params_optimizer_state()
    found: Outcome = {}
    for name, p in module.named_parameters():
        if not p.requires_grad:
            continue
        if hasattr(loop.strategy, "full_parameters"):
            moments = [safe_get_full_optimizer_state(p, kind) for kind in ("exp_avg", "exp_avg_sq")]
            whole = [safe_get_full_fp32_param(p), *moments]
        else:
            whole = [p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]
        found |= {f"{name} {i}": one.detach().clone() for i, one in enumerate(whole)}
    inner = getattr(optimizer, "optimizer", optimizer)
    steps = {float(states["step"]) for states in inner.state.values()}
    return {"tensors": found, "steps": steps, "rates": [group["lr"] for group in optimizer.param_groups]}


def fit(rank: int | None, chosen: Any, module: Net, resumed: Path | None = None, **kwargs: Any) -> pl.Trainer:
    loop = trainer(chosen, gradient_clip_val=0.05, **kwargs)
    loop.fit(module, loader(rank), ckpt_path=resumed, weights_only=False)
    return loop  # type: ignore[no-any-return, unused-ignore]


def seeded(seed: int, kind: type[Grouped] = Grouped) -> Grouped:
    torch.manual_seed(seed)
    return kind()


def alone() -> Outcome:
    """One process, both epochs."""
    module = seeded(100)
    return {"end": state(fit(None, None, module), module), "losses": module.losses}


def save(rank: int, folder: Path, case: str) -> Outcome:
    """The first epoch."""
    name, fields, kwargs = CASES[case]
    module = seeded(100 + rank)
    loop = fit(rank, strategy(name, **fields), module, max_epochs=1, **kwargs)
    loop.save_checkpoint(folder / case)
    frozen, bias = (one.detach().clone() for one in module.frozen.parameters())
    return {"saved": state(loop, module), "frozen": frozen, "frozen_bias": bias}


def go_on(rank: int, folder: Path, case: str, *, forget: bool = False) -> Outcome:
    """The second epoch, from other weights than what is saved."""
    name, fields, kwargs = CASES[case]
    module, look, chosen = seeded(500 + rank), Look(forget=forget), strategy(name, **fields)
    loop = fit(rank, chosen, module, folder / case, callbacks=[look], **kwargs)
    frozen = chosen.full_parameters()["frozen.weight"]
    return {"begin": look.found, "end": state(loop, module), "losses": module.losses, "frozen": frozen}


def evaluate(rank: int, folder: Path, case: str) -> Outcome:
    """What the saved weights make of the samples, without a fit: in the order of the data."""
    name, fields, kwargs = CASES[case]
    module, chosen = seeded(500 + rank), strategy(name, **fields)
    trainer(chosen, **kwargs).test(module, loader(rank), folder / case, verbose=False, weights_only=False)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, module.tested)
    return {
        "outputs": torch.cat([row.unsqueeze(0) for batch in zip(*parts, strict=True) for row in interleaved(batch)])
    }


def interleaved(parts: tuple[Tensor, ...]) -> list[Tensor]:
    """The rows of a global batch, of which rank r had the r-th, the (r + ranks)-th, ..."""
    return [row for rows in zip(*parts, strict=True) for row in rows]


def refused(rank: int, folder: Path, what: str) -> Outcome:
    """What is said of a checkpoint of stage 2 that cannot be shared anew."""
    here = folder / f"refused {what}"
    if what == "stage as many":
        here = folder / "2"  # read by two ranks, as it is
    else:
        shutil.copytree(folder / "2", here)
    for path in here.glob("checkpoint/*_optim_states.pt") if "stage" not in what else ():
        saved = torch.load(path, weights_only=False)
        inner = saved["optimizer_state_dict"]["base_optimizer_state"]
        if what == "optimizer":
            inner["state"][0]["absmax"] = torch.ones(3)
        elif what == "elastic":
            saved["optimizer_state_dict"]["base_optimizer_state"] = [*inner["state"].values()]
        elif what == "experts":
            saved["optimizer_state_dict"]["partition_count"] = [2, 1]
        torch.save(saved, path)
    if what == "model parallel":
        path.rename(path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))
    elif what == "nvme":
        (here / "checkpoint" / "offloaded_tensors").mkdir()
    name = "deepspeed_stage_3" if "stage" in what else "deepspeed_stage_2"
    try:
        fit(rank, strategy(name), seeded(1, AllTrained if what == "parameters" else Grouped), here)
    except CheckpointError as error:
        return {"error": str(error)}
    return {"error": None}


def fabric(rank: int, folder: Path, *, resumed: bool) -> Outcome:
    """Two steps in a loop of one's own, which are saved; or the three steps behind them."""
    chosen, world = strategy("deepspeed_stage_3", "fabric"), dist.get_world_size()
    run = Fabric(accelerator="cpu", devices=world, strategy=chosen, plugins=[TorchElasticEnvironment()])
    run.launch()
    layers = net(500 if resumed else 100)
    model = nn.Sequential(layers.inlet, layers.frozen, nn.Tanh(), layers.head)
    engine, stepper = run.setup(model, torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.02))
    objects = {"model": engine, "optimizer": stepper, "steps": 2}
    if resumed:
        run.load(folder / "fabric", objects | {"steps": 0})
    for start in (16, 24, 32) if resumed else (0, 8):
        x, y = (part[rank::world] for part in DATA[start : start + 8])
        run.backward(nn.functional.mse_loss(engine(x), y))
        stepper.step()
        stepper.zero_grad()
    if not resumed:
        run.save(folder / "fabric", objects)
    return {"weights": chosen.full_parameters()}


def table(rank: int, folder: Path) -> dict[str, Callable[[], Outcome]]:
    reasons = ("stage", "stage as many", "optimizer", "elastic", "experts", "model parallel", "nvme", "parameters")
    return {
        "alone": alone,
        **{f"save {case}": partial(save, rank, folder, case) for case in CASES},
        **{f"go on {case}": partial(go_on, rank, folder, case) for case in CASES},
        **{f"evaluate {case}": partial(evaluate, rank, folder, case) for case in EVALUATED},
        "forget": partial(go_on, rank, folder, "1", forget=True),
        **{f"refused {what}": partial(refused, rank, folder, what) for what in reasons},
        "save fabric": partial(fabric, rank, folder, resumed=False),
        "go on fabric": partial(fabric, rank, folder, resumed=True),
    }


def doing(rank: int, folder: str, names: tuple[str, ...]) -> dict[str, Outcome]:
    """All of the table on this rank whose names begin so."""
    sys.path.insert(0, str(Path(__file__).parent))
    warnings.simplefilter("ignore")  # of DeepSpeed and Lightning, about each other
    found: dict[str, Outcome] = {}
    for name, run in table(rank, Path(folder)).items():
        if name.startswith(names):
            try:
                found[name] = run()
            except Exception:
                found[name] = {"failed": traceback.format_exc()}
    return found

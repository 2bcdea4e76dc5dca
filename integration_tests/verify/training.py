"""Small models under a mutation, on ranks and in one process, as `fairlead verify` trains and judges them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as L
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader, TensorDataset

from fairlead_distributed.testing import run_ranks
from fairlead_lightning.verify.notes import Notes
from fairlead_lightning.verify.plan import Plan
from fairlead_lightning.verify.probe import LayoutProbe
from fairlead_lightning.verify.reference import Reference, References
from fairlead_lightning.verify.verdict import judged
from fairlead_strategies.ddp import DDPStrategyConfig
from fairlead_strategies.ddp_runtime import build as build_ddp
from fairlead_strategies.deepspeed.config import DeepSpeedStrategyConfig
from fairlead_strategies.fsdp import FSDPStrategyConfig
from fairlead_strategies.mesh.plugins import (
    FSDP2StrategyConfig,
    HybridStrategyConfig,
    PipelineParallelStrategyConfig,
    TensorParallelStrategyConfig,
)
from fairlead_strategies.mesh_build import build as build_mesh
from integration_tests.verify.loaders import SPLIT_BY_THEMSELVES, Loaded
from integration_tests.verify.models import MODELS

STEPS = 3
_OTHER_BEGINNINGS = ("other_weights", "same_data")
"""Mutations of what the reference begins with, too."""


@dataclass(frozen=True)
class Case:
    """One training: a model, a strategy, settings of the Trainer, and what is done to it.

    Attributes:
        mutation: A function in `mutations.py`, or `pipeline.frozen` in `mutations_pipeline.py`.
        batches: Of a replica, in its epoch.
        loader: One of `loaders.py`, which the ranks read in place of their parts.
    """

    mutation: str
    model: str = "Net"
    strategy: str = "ddp"
    fields: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    clip: float | None = None
    batches: int = 8
    loader: str = ""

    @property
    def reference(self) -> str:
        """Cases with the same one, and as many replicas, have the same reference."""
        own = self.mutation if self.mutation in _OTHER_BEGINNINGS else ""
        return f"{self.model} {self.accumulate} {self.clip} {self.batches} {self.loader} {own}"

    def mutated(self) -> AbstractContextManager[None]:
        """What is done to this process meanwhile."""
        where, _, name = self.mutation.rpartition(".")
        module = importlib.import_module(f"integration_tests.verify.mutations{f'_{where}' if where else ''}")
        made: AbstractContextManager[None] = getattr(module, name)()
        return made


def data(replica: int, replicas: int, tokens: tuple[int, ...], batches: int, batch: int = 6) -> DataLoader[Any]:
    """A replica's share of each global batch; the same samples at every call."""
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(96, *tokens, size, generator=generator) for size in (6, 2))
    mine = torch.arange(96).view(-1, replicas, batch)[:batches, replica].flatten()
    return DataLoader(TensorDataset(x[mine], y[mine]), batch_size=batch)


def train_cases(rank: int, world_size: int, cases: list[Case], folder: str) -> list[str]:
    """On each rank: all cases one after another; what each ended with, an empty text where it did not fail."""
    torch.set_num_threads(1)
    return [_train(rank, world_size, case, Path(folder, str(i))) for i, case in enumerate(cases)]


def _train(rank: int, world_size: int, case: Case, folder: Path) -> str:
    torch.manual_seed(100 + rank)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    folder.mkdir(exist_ok=True)
    with case.mutated():
        strategy = _strategy(case, world_size)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=strategy,
            plugins=[TorchElasticEnvironment()],
            enable_checkpointing=False,
            limit_val_batches=0,
            max_epochs=1,
            max_steps=STEPS,
            use_distributed_sampler=bool(case.loader) and case.loader not in SPLIT_BY_THEMSELVES,
            accumulate_grad_batches=case.accumulate,
            gradient_clip_val=case.clip,
            callbacks=[LayoutProbe(Plan("layout", str(folder)))],
            **quiet,
        )
        if case.loader:
            trainer.fit(MODELS[case.model](), datamodule=Loaded(case.loader))
            return ""
        layout = getattr(strategy, "layout", None)
        replica, replicas = (layout.data_rank(rank), layout.data_parallel) if layout else (rank, world_size)
        tokens = (8,) if any(name in case.model for name in ("Stack", "Sequence", "Counted")) else ()
        trainer.fit(MODELS[case.model](), data(replica, replicas, tokens, case.batches))
    return ""


def _strategy(case: Case, world_size: int) -> Any:
    context = _stand_ins().context
    if case.strategy == "deepspeed":
        runtime: Any = importlib.import_module("fairlead_strategies.deepspeed.runtime")  # takes seconds
        sharded = DeepSpeedStrategyConfig(**case.fields)
        return runtime.build(sharded, context(sharded, devices=world_size, world_size=world_size))
    if case.strategy == "ddp":
        config = DDPStrategyConfig(**case.fields)
        return build_ddp(config, context(config, devices=world_size, world_size=world_size))
    mesh = _MESH[case.strategy](**case.fields)
    return build_mesh(mesh, context(mesh, devices=world_size, world_size=world_size))


_MESH: dict[str, Any] = {
    "fsdp": FSDPStrategyConfig,
    "fsdp2": FSDP2StrategyConfig,
    "tensor_parallel": TensorParallelStrategyConfig,
    "hybrid": HybridStrategyConfig,
    "pipeline_parallel": PipelineParallelStrategyConfig,
}


@functools.cache
def _stand_ins() -> ModuleType:
    """What the tests of the strategies build them with."""
    path = Path(__file__).parents[2] / "packages" / "strategies" / "tests" / "ranks.py"
    spec = importlib.util.spec_from_file_location("fairlead_strategies_test_ranks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class CaseBuild:
    """How the reference of a case is made."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def model(self) -> L.LightningModule:
        return MODELS[self._case.model]()

    def data(self) -> L.LightningDataModule | None:
        return Loaded(self._case.loader) if self._case.loader else None

    def trainer(self, precision: Any, accumulate: int, steps: int, callbacks: Sequence[L.Callback]) -> L.Trainer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return L.Trainer(
                accelerator="cpu",
                devices=1,
                precision=precision,
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=False,
                limit_val_batches=0,
                max_epochs=1,
                max_steps=steps,
                accumulate_grad_batches=accumulate,
                gradient_clip_val=self._case.clip,
                callbacks=list(callbacks),
            )


class Judge:
    """What `verify` says of cases: those of the same model and batches share their reference.

    Args:
        cases: All of them, trained on ranks in one start.
        ranks: How many.
        folder: Where the ranks leave their notes.
        environ: Variables of the ranks.
    """

    def __init__(
        self, cases: Mapping[str, Case], ranks: int, folder: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        self._cases, self._folder = dict(cases), folder
        self._measured: dict[str, References] = {}
        run_ranks(train_cases, ranks, ranks, list(cases.values()), str(folder), timeout=240, env=environ)

    def __call__(self, name: str) -> dict[str, Any]:
        """The verdict on one case."""
        case = self._cases[name]
        notes = Notes.read(self._folder / str(list(self._cases).index(name)))
        reference = Reference(CaseBuild(case), notes)
        key = f"{case.reference} {notes.replicas}"
        if key not in self._measured:
            self._measured[key] = reference.measure(3)
        return judged(notes, reference, self._measured[key])

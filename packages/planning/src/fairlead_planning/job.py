"""What is planned: a job's model, batch and optimizers, ready to be traced, and by what it can be divided."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fairlead.config import JobConfig
from fairlead.errors import ConfigError, UserCodeError
from fairlead.jobs import LoadedJob
from fairlead.user_code import CodeRoot, user_error, user_frames
from fairlead_distributed.activation_checkpointing import find_layers
from fairlead_distributed.parallel.plans import HEADS, automatic, from_patterns
from fairlead_lightning.checkpoint.rebuilt import build_user_object
from fairlead_planning.profile import Profile
from fairlead_planning.trace import Work, trace, trace_rows, with_samples
from fairlead_runs.batch_size import batch_of_job

_EIGHT_BITS: Final = ("fp8-torchao", "transformer-engine")
"""Precisions whose matrix products are in 8 bits."""
_ROWS: Final = (4, 8)
"""Micro-batches that are traced, where what a step does depends on its batch."""


@dataclass(frozen=True)
class Divisible:
    """By what a model can be divided, beside its units and its batch.

    Attributes:
        tensor: Numbers of ranks of which each must divide one of these (heads, features); empty: it cannot be split.
        tensor_refusal: Why it cannot.
        pipeline_refusal: Why it cannot be cut into stages; empty: it can.
        experts: Experts of each mixture; 0: it has none.
        length: Positions of a sequence; 1: there are none.
        layer_classes: The classes of its units, as a job file names them.
    """

    tensor: tuple[int, ...] = ()
    tensor_refusal: str = ""
    pipeline_refusal: str = ""
    experts: int = 0
    length: int = 1
    layer_classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Planned:
    """A traced job.

    Attributes:
        name: Its run's.
        profile: A step of `profile.rows` samples.
        wider: The same of more, if the batch can be divided.
        divisible: By what its model can be divided.
        samples: Of one optimizer step of one data-parallel rank, as the job says; with `batch_size: global` of all.
        steps: Optimizer steps of the job, given how many samples one takes; None: it does not say.
        compiled: Whether the model is compiled.
        settings: The job's own, where it was loaded from one.
        precision: As `trainer.precision`.
        products: The number format of matrix products, if it is a narrower one: `float8`.
    """

    name: str
    profile: Profile
    wider: Profile | None
    divisible: Divisible
    samples: int
    steps: Callable[[int], int | None] = field(default=lambda _: None)
    compiled: bool = False
    settings: JobConfig | None = None
    precision: str = "32-true"
    products: str | None = None


def planned_work(work: Work, *, name: str = "model", samples: int | None = None, steps: int | None = None) -> Planned:
    """A model, a batch and a loss of one's own, ready to be planned.

    Args:
        work: What is trained.
        name: For messages.
        samples: Of one optimizer step of one data-parallel rank; None: those of the batch.
        steps: Optimizer steps of the training.

    Raises:
        ConfigError: A step cannot be traced.
    """
    rows = _rows(work.batch)
    parts = _Parts("auto")
    profile, wider = _traced(replace(work, plan=parts.of), rows)
    divisible = replace(parts.found, length=profile.tokens // profile.rows)
    return Planned(
        name, profile, wider, divisible, samples or rows or 1, lambda _: steps, parts.compiled, precision=work.precision
    )


def planned_job(loaded: LoadedJob, device: str = "cuda") -> Planned:
    """A job, with its model built without weights and a batch of its data.

    Raises:
        UserCodeError: The job's code fails where tensors have no data; the message says on which line.
        ConfigError: A step cannot be traced.
    """
    job, root = loaded.job, loaded.root
    assert job is not None
    config = job.trainer
    batch, dataset = _batch(job, root)
    rows = _rows(batch)
    steps = config.max_steps if config.max_steps and config.max_steps > 0 else None
    precision = _mode(config.precision)
    strategy = config.strategy
    patterns: Any = getattr(strategy, "plan", None) or "auto"
    low = getattr(getattr(strategy, "mixed_precision", None), "param_dtype", None)
    if low is not None and precision == "32-true":  # FSDP2's own: parameters and states as with autocast
        precision = "bf16-mixed" if low == "bfloat16" else "16-mixed"
    parts = _Parts(patterns)
    work = Work(
        lambda: _model(job, root, steps or 1000),
        batch,
        lambda module, one: _step(module, one, root),
        lambda module: _optimizers(module, root),
        precision,
        device,
        parts.of,
    )
    with _silent():
        profile, wider = _traced(work, rows)
    samples = batch_of_job(job) or rows or 1
    if config.batch_size != "global":  # that is of the full step already
        samples *= config.accumulate_grad_batches

    def count(global_batch: int) -> int | None:
        if steps is not None:
            return steps
        if dataset is None or config.max_epochs is None or config.max_epochs < 1:
            return None
        return math.ceil(dataset / global_batch) * config.max_epochs

    divisible = replace(parts.found, length=profile.tokens // profile.rows)
    name, narrow = job.run.name or "job", getattr(config.precision, "name", "") in _EIGHT_BITS
    products = "float8" if narrow else None
    return Planned(name, profile, wider, divisible, samples, count, parts.compiled, job, precision, products)


def _mode(precision: Any) -> str:
    """The number formats of a precision, as Lightning names them: `bf16-mixed`."""
    mode = getattr(precision, "precision", None)  # of FSDP's and DeepSpeed's own
    if isinstance(mode, str):
        return mode
    name, short = getattr(precision, "name", "32-true"), {"bfloat16": "bf16", "float16": "16"}
    low = short.get(str(getattr(precision, "dtype", "")), "bf16")
    if name in ("32-true", "64-true"):
        return str(name)
    # Precisions of 8 and 4 bits keep parameters and activations in 16 bits, or compute with those between.
    return f"{low}-true" if name == "half" else f"{low}-mixed"


def _traced(work: Work, rows: int | None) -> tuple[Profile, Profile | None]:
    if rows is None:
        return trace(work), None
    one, two = trace_rows(work, rows)
    if two is not None:
        return one, two
    one, two = (trace(replace(work, batch=with_samples(work.batch, rows, count))) for count in _ROWS)
    return one, two


def _rows(batch: Any) -> int | None:
    """How many samples a batch has, if all of its tensors are of as many."""
    sizes = {len(one) for one in tree_leaves(batch) if isinstance(one, Tensor) and one.ndim}
    return sizes.pop() if len(sizes) == 1 else None


class _Parts:
    """By what a model can be divided, found when it is traced."""

    def __init__(self, patterns: Any) -> None:
        self._patterns = patterns
        self.found = Divisible()
        self.compiled = False

    def of(self, model: nn.Module) -> dict[str, str]:
        """The plan of tensor parallelism by module."""
        words, self.found = _divisible(model, self._patterns)
        self.compiled = any(
            isinstance(part, torch._dynamo.OptimizedModule) or part._compiled_call_impl is not None
            for part in model.modules()
        )
        return words


def _divisible(model: nn.Module, patterns: Any) -> tuple[dict[str, str], Divisible]:
    words: dict[str, str] = {}
    tensor: list[int] = []
    refusal = ""
    try:
        found = automatic(model, 1, False) if patterns == "auto" else from_patterns(model, patterns)
        words = {name: one[0] for name, one in found.layers.items()}
    except ConfigError as error:
        refusal = error.what
    for name, word in words.items():
        layer = model.get_submodule(name)
        owner = model.get_submodule(name.rpartition(".")[0])
        tensor += [size for one in HEADS if isinstance(size := getattr(owner, one, None), int)]
        if word in ("colwise", "rowwise"):
            size = getattr(layer, "out_features" if word == "colwise" else "in_features", None)
            tensor += [size] if isinstance(size, int) else []
    layers = find_layers(model)
    stages = (
        ""
        if callable(getattr(model, "pipeline_layers", None))
        else (f"{type(model).__name__} has no pipeline_layers() that says how it is cut into stages")
    )
    experts = [len(one) for m in model.modules() if isinstance(one := getattr(m, "experts", None), nn.ModuleList)]
    classes = sorted({f"{type(layer).__module__}:{type(layer).__qualname__}" for layer in layers.values()})
    return words, Divisible(
        tensor=tuple(sorted(set(tensor))),
        tensor_refusal=refusal,
        pipeline_refusal=stages,
        experts=math.gcd(*experts) if experts else 0,
        layer_classes=tuple(classes),
    )


class _Trainer(pl.Trainer):
    """What a module asks for while it is traced: how long the training is, and nothing that runs."""

    steps: int = 1000

    @property
    def estimated_stepping_batches(self) -> int:
        return self.steps


def _model(job: JobConfig, root: CodeRoot, steps: int) -> pl.LightningModule:
    """The job's module with all of its layers; its log goes nowhere."""
    try:
        module: Any = build_user_object(job.model, root, "model", pl.LightningModule)
    except UserCodeError as error:
        error.fix = error.fix or _FIX
        raise
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "inference_mode")
    alone: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "plugins": [LightningEnvironment()]}
    trainer = _Trainer(max_steps=steps, **alone, **dict.fromkeys(off, cast("Any", False)))
    trainer.steps = steps
    trainer.strategy.name = "single_device"  # type: ignore[attr-defined]  # what a `configure_model` asks for
    module.trainer = trainer
    module.log = module.log_dict = _nothing
    try:
        module.configure_model()
    except Exception as error:
        raise user_error(
            "configure_model failed, without data and in one process", error, root, where="model", fix=_FIX
        ) from error
    if not module.automatic_optimization:
        raise ConfigError(
            f"{type(module).__name__} optimizes by hand, and what its step does with which optimizer is not known",
            where="model",
            fix="plan its model in Python: fairlead_planning.plan(Work(model, batch, loss), '64xh100')",
        )
    return cast("pl.LightningModule", module)


_FIX: Final = (
    "have it not read numbers out of weights there (`.item()`, `.numpy()`, loading a checkpoint); "
    "or plan the model in Python with fairlead_planning.plan(Work(...))"
)


def _step(module: Any, batch: Any, root: CodeRoot) -> Any:
    try:
        batch = module.on_after_batch_transfer(module.on_before_batch_transfer(batch, 0), 0)
        out = module.training_step(batch, 0)
    except ConfigError as error:
        frames = user_frames(error, root)
        if frames and error.where is None:
            error.where = f"{frames[-1].filename}:{frames[-1].lineno}, {frames[-1].line}"
        raise
    except Exception as error:
        raise user_error("training_step failed, without data", error, root, where="model", fix=_FIX) from error
    if isinstance(out, Mapping):
        out = out.get("loss")
    if not isinstance(out, Tensor):
        raise UserCodeError(
            f"training_step gave {type(out).__name__}, no loss", where="model", fix="return the loss, or {'loss': it}"
        )
    return out


def _optimizers(module: Any, root: CodeRoot) -> list[torch.optim.Optimizer]:
    try:
        found = module.configure_optimizers()
    except Exception as error:
        raise user_error("configure_optimizers failed, without data", error, root, where="model", fix=_FIX) from error
    optimizers = [one for one in _nested(found) if isinstance(one, torch.optim.Optimizer)]
    if len(optimizers) > 1:
        raise ConfigError(
            f"{type(module).__name__} has {len(optimizers)} optimizers, which Lightning steps by hand only",
            where="model",
            fix="give one optimizer groups of parameters; or set automatic_optimization to False and plan the model in "
            "Python: fairlead_planning.plan(Work(model, batch, loss, optimizers), '64xh100')",
        )
    return optimizers


def _nested(found: Any) -> Iterator[Any]:
    """The optimizers in whatever form Lightning takes."""
    if isinstance(found, Mapping):
        yield found.get("optimizer")
    elif isinstance(found, list | tuple):
        for one in found:
            yield from _nested(one)
    else:
        yield found


def _batch(job: JobConfig, root: CodeRoot) -> tuple[Any, int | None]:
    """A training batch of the job, and how many samples its data have."""
    data: Any = None
    try:
        with _silent():
            if job.data is not None:
                data = build_user_object(job.data, root, "data", pl.LightningDataModule)
                data.prepare_data()
                data.setup("fit")
                loader = data.train_dataloader()
            else:
                loader = build_user_object(job.model, root, "model", pl.LightningModule).train_dataloader()
            batch = next(iter(loader), None)
    except UserCodeError:
        raise
    except Exception as error:
        raise user_error(
            "no training batch can be had of the job's data",
            error,
            root,
            where="data",
            fix="plan where the data are; or in Python with a batch of your own: fairlead_planning.plan(Work(...))",
        ) from error
    if batch is None:
        raise ConfigError(
            "the job's data give no training batch",
            where="data",
            why="train_dataloader() gives a loader that is empty",
            fix="plan where the data are; or in Python with a batch of your own: fairlead_planning.plan(Work(...))",
        )
    dataset = getattr(loader, "dataset", None)
    try:
        size = len(dataset) if dataset is not None else None
    except TypeError:
        size = None  # a stream
    return batch, size


@contextmanager
def _silent() -> Iterator[None]:
    """Lightning warns of much that has no meaning without a run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _nothing(*_: Any, **__: Any) -> None:
    return None

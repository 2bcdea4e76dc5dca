"""The model of a checkpoint: built from its run's job or by a function of the user's, with the weights to export."""

from __future__ import annotations

import inspect
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from fairlead import yaml
from fairlead.cli.session import Session
from fairlead.errors import CheckpointError, ConfigError, UserCodeError, did_you_mean
from fairlead.user_code import CodeRoot, code_root, import_callable, instantiate, user_error
from fairlead_checkpoint_io.commands.sources import Source
from fairlead_distributed.full_state import named_as, plain_name
from fairlead_distributed.run.loading import as_it_was_saved, readable_load_errors
from fairlead_runs.checkpoint_job import checkpoint_job, job_file, refuse_stand_ins

_WRAPPED: Final = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Under which name torch.compile, activation checkpointing and FSDP1 keep the module that they wrap."""
_AVERAGED: Final = "module."
_COUNT: Final = "n_averaged"
_NO_AVERAGE: Final = ("state_dict", "optimizer_states", "current_model_state")
_DEPTH: Final = 4


@dataclass(frozen=True)
class Built:
    """A model as its code makes it, the data of its job if there are any, and where the user's code is found."""

    model: nn.Module
    data: Any
    root: CodeRoot
    name: str


def build(
    source: Source, state: Mapping[str, Any], session: Session, factory: str | None, overrides: Sequence[str]
) -> Built | None:
    """The model and data of a checkpoint's job, or the model that `factory` makes; None: no class is known."""
    if factory is not None:
        root = code_root(None, code=None, cwd=session.cwd)
        args = _hyperparameters(import_callable(factory, root, where="--model"), state)
        return Built(_made({"class": factory, "args": args}, root, "--model"), None, root, factory)
    try:
        document = yaml.load_file(job_file(source.path)).data
    except CheckpointError:
        return None  # a single file, or a folder of somebody else's
    model = document.get("model") if isinstance(document, Mapping) else None
    if not isinstance(model, str) and not (isinstance(model, Mapping) and "class" in model):
        return None  # a loop names its modules
    here: dict[str, Any] = {"plugins": session.plugins, "cwd": session.cwd, "environ": session.environ}
    found = checkpoint_job(source.path, overrides=overrides, **here)
    job, root = found.loaded.job, found.loaded.root
    assert job is not None
    refuse_stand_ins(job, fix="name what makes the model: --model module:factory, and a sample input: --sample FILE")
    torch.manual_seed(job.run.seed or 0)
    made = _made({"class": job.model.class_, "args": job.model.args}, root, "model")
    data: Any = None
    if job.data is not None:
        data = instantiate({"class": job.data.class_, "args": job.data.args}, root, path=("data",))
    return Built(made, data, root, job.model.class_)


def is_lightning(thing: object) -> bool:
    """Whether it is a LightningModule; the user's code has imported Lightning then."""
    pl = sys.modules.get("lightning.pytorch")
    return pl is not None and isinstance(thing, pl.LightningModule)


def _hyperparameters(target: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Those that Lightning has saved of a module's arguments, and that this one takes."""
    saved = state.get("hyper_parameters")
    if not isinstance(saved, Mapping) or not callable(target):
        return {}
    taken = inspect.signature(target).parameters
    every = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    return {name: value for name, value in saved.items() if every or name in taken}


def _made(spec: Mapping[str, Any], root: CodeRoot, where: str) -> nn.Module:
    """The model, with the layers that a LightningModule makes in a hook, and a Trainer that it can ask."""
    thing = instantiate(spec, root, path=(where,))
    if not isinstance(thing, nn.Module):
        raise UserCodeError(f"{spec['class']} made a {type(thing).__name__}, not a torch.nn.Module", where=where)
    model: Any = _inner(thing)
    if is_lightning(model):
        import lightning.pytorch as pl
        from lightning.pytorch.plugins.environments import LightningEnvironment

        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "inference_mode")
        alone: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "plugins": [LightningEnvironment()]}
        try:
            with silent():
                model.trainer = pl.Trainer(limit_val_batches=1, **alone, **dict.fromkeys(off, cast("Any", False)))
                model.trainer.strategy.name = "single_device"  # what a `configure_model` asks for
                model.configure_model()
        except Exception as error:
            fix = (
                "have it leave the model unsplit where there is one rank, or name what makes it: --model module:factory"
            )
            raise user_error("configure_model failed, in one process", error, root, where=where, fix=fix) from error
    return _unwrapped(cast("nn.Module", model))


@contextmanager
def silent() -> Iterator[list[warnings.WarningMessage]]:
    """Lightning and exporters print, log and warn of much that is of no use here; gives the warnings."""
    printed = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, redirect_stdout(printed), redirect_stderr(printed):
        warnings.simplefilter("always")
        logging.disable(logging.WARNING)
        try:
            yield caught
        finally:
            logging.disable(logging.NOTSET)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model, without what training wraps around parts of it."""
    for one in list(model.modules()):
        one._compiled_call_impl = None  # of `module.compile()`
        one._modules.update({name: _inner(child) for name, child in one._modules.items() if child is not None})
    return model


def _inner(module: nn.Module) -> nn.Module:
    if isinstance(module, DistributedDataParallel | DataParallel):
        return _inner(module.module)
    inside = next((one for name in _WRAPPED if (one := module._modules.get(name)) is not None), None)
    return module if inside is None else _inner(inside)


def load(built: Built, state: dict[str, Any], weights: Mapping[str, Any], source: Source) -> None:
    """Loads the weights, as Lightning would, and has the model evaluate."""
    model: Any = built.model
    if is_lightning(model):
        model.on_load_checkpoint(state)
    if any(isinstance(one, Tensor) and one.dtype is torch.float64 for one in weights.values()):
        model.double()  # of a run with precision: 64-true
    done = as_it_was_saved(model)
    try:
        with readable_load_errors(source.content):
            own = named_as(model, _of_model(model, weights))
            model.load_state_dict(own, strict=getattr(model, "strict_loading", True))
    except CheckpointError as error:
        error.fix = "name what makes the model that it was written with, or a part of it: --model module:factory"
        raise
    done()
    _unwrapped(model).eval()  # also what a `setup` has wrapped


def _of_model(model: nn.Module, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those of a model that is a part of what the checkpoint has: of a `Run` one of its modules, of another a layer."""
    names = [plain_name(name) for name in model.state_dict()]
    if not names or names[0] in weights:
        return weights
    before = [name.removesuffix(names[0]) for name in weights if name.endswith(f".{names[0]}")]
    complete = [one for one in before if all(one + name in weights for name in names)]
    trained = [one for one in complete if one.removesuffix(_AVERAGED) + _COUNT not in weights]
    return {name: weights[trained[0] + name] for name in names} if len(trained) == 1 else weights


def part_of(built: Built, name: str | None) -> nn.Module:
    """The module to export."""
    names: dict[str, nn.Module] = dict(built.model.named_modules())
    if name is None or name in names:
        return names[name or ""]
    near = did_you_mean(name, names)
    why = f"it has: {', '.join(key for key, _ in built.model.named_children()) or 'none'}"
    fix = f"did you mean {near!r}?" if near else None
    raise ConfigError(f"{type(built.model).__name__} has no module {name!r}", where="--part", why=why, fix=fix)


# -- averaged weights


def averaged(state: Mapping[str, Any], weights: Mapping[str, Any], name: str, where: str) -> tuple[dict[str, Any], str]:
    """The weights with those of an average instead of the trained ones, and what that average is called.

    `name` is the end of its name; "": the only one.  `CheckpointError`: there is none, or there are several.
    """
    found = dict(_averages(state, weights))
    fitting = [key for key in found if not name or f".{key}".endswith(f".{name}")]
    if len(fitting) == 1:
        return {**weights, **found[fitting[0]]}, fitting[0]
    what = f"the checkpoint has no average {name!r}" if not fitting else "the checkpoint has several averages"
    why, fix = f"there are: {', '.join(found)}", "name one: --ema NAME"
    if not found:
        what, fix = "the checkpoint has no averaged weights", "leave out --ema"
        why = "there is neither Lightning's WeightAveraging, nor an AveragedModel, nor tensors of the weights' names"
    raise CheckpointError(what, where=where, why=why, fix=fix)


def _averages(state: Mapping[str, Any], weights: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if "averaging_state" in state:  # Lightning saves the average as the model, and the model beside it
        yield "WeightAveraging", {}
    for count in (name for name in weights if name.endswith(f".{_COUNT}")):
        # `self.ema = AveragedModel(self.net)` in a model averages the module that has the same names.
        inside = count.removesuffix(_COUNT) + _AVERAGED
        rest = [name.removeprefix(inside) for name in weights if name.startswith(inside)]
        for name in weights if rest else ():
            net = name.removesuffix(rest[0])
            if name == net + rest[0] and net != inside and all(net + one in weights for one in rest):
                yield count.removesuffix(f".{_COUNT}"), {net + one: weights[inside + one] for one in rest}
                break
    for name, one in _mappings({key: value for key, value in state.items() if key not in _NO_AVERAGE}, (), 0):
        tensors = {key.removeprefix(_AVERAGED): value for key, value in one.items() if isinstance(value, Tensor)}
        tensors.pop(_COUNT, None)
        if tensors and all(getattr(weights.get(key), "shape", None) == value.shape for key, value in tensors.items()):
            yield name, tensors


def _mappings(value: Any, path: tuple[str, ...], depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The mappings in a state at any depth, by the names that lead there."""
    if not isinstance(value, Mapping) or depth > _DEPTH:
        return
    if path and all(isinstance(key, str) for key in value):
        yield ".".join(path), dict(value)
    for key, one in value.items():
        yield from _mappings(one, (*path, str(key)), depth + 1)

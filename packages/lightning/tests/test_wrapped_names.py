"""Names in checkpoints are those of the module as it was written; a resume matches them whatever wraps its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_job import Data, Line, apart, latest, loader, make_trainer, plain
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fairlead.config import ClassSpec
from fairlead.user_code import CodeRoot
from fairlead_distributed.full_state import named_as, plain_state
from fairlead_lightning.checkpoint.rebuilt import build_user_object

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


class Part(Line):
    def __init__(self) -> None:
        super().__init__()
        self.net = compiled(self.net)


class Nested(Line):
    """Beside a batch norm's buffers, and a layer that is called as DistributedDataParallel calls its own."""

    def __init__(self) -> None:
        super().__init__()
        inner = torch.nn.Sequential(compiled(self.net), checkpoint_wrapper(torch.nn.Linear(1, 4)))
        self.net = compiled(torch.nn.Sequential(inner, torch.nn.BatchNorm1d(4), Named()))


class Named(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)  # type: ignore[no-any-return]


class Twice(Line):
    """The same layer, compiled and not."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = compiled(self.net)


def factory() -> Any:
    return compiled(Line())


def made(kind: Any) -> Any:
    torch.manual_seed(0)
    here = CodeRoot(((Path(__file__).parent, "tests"),))
    return build_user_object(ClassSpec.model_validate({"class": f"{__name__}:{kind.__name__}"}), here, "model", Line)


@pytest.mark.parametrize("kind", [Part, Nested, Twice, factory])
def test_a_resume_of_compiled_parts_ends_with_the_same_bits(tmp_path: Path, kind: Any) -> None:
    whole = made(kind)
    make_trainer(tmp_path / "whole", max_steps=12).fit(whole, datamodule=Data())
    for steps in (5, 12):
        resumed = made(kind)
        make_trainer(tmp_path / "cut", max_steps=steps).fit(resumed, datamodule=Data())
    assert apart(resumed, whole) == 0
    file = latest(tmp_path / "cut" / "run").path / "state.ckpt"
    names = list(torch.load(file, weights_only=True)["state_dict"])
    assert names
    assert not [name for name in names if any(wrapper in name for wrapper in WRAPPERS)]

    (expected,) = plain().validate(whole, loader(), verbose=False)
    (found,) = make_trainer(tmp_path / "cut").validate(made(kind), loader(), ckpt_path=file, verbose=False)
    assert found == expected


def test_names_are_matched_both_ways() -> None:
    plainly = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    wrapped = compiled(torch.nn.Sequential(compiled(torch.nn.Linear(2, 2)), torch.nn.BatchNorm1d(2)))
    state = wrapped.state_dict()
    assert list(plain_state(state)) == list(plainly.state_dict())
    versions: Any = plain_state(state)
    assert versions._metadata["1"] == {"version": 2}
    plainly.load_state_dict(named_as(plainly, state))
    wrapped.load_state_dict(named_as(wrapped, plainly.state_dict()))
    # Of a file that a script wrote from its DistributedDataParallel.
    of_ddp = {f"module.{name}": value for name, value in plainly.state_dict().items()}
    wrapped.load_state_dict(named_as(wrapped, of_ddp))
    unknown = {"other.weight": torch.zeros(1)}
    assert named_as(wrapped, unknown) == unknown
    assert plain_state({"module.weight": 1}) == {"module.weight": 1}, "a layer of the user's own"

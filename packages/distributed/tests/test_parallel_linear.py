"""`ColumnParallelLinear` and `RowParallelLinear`, against torch's own layers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fairlead.errors import ConfigError
from fairlead_distributed.parallel.linear import ColumnParallelLinear, RowParallelLinear
from fairlead_distributed.testing import run_ranks
from integration_tests.split_models import Collectives, whole

WIDTH, HIDDEN = 12, 24


class MLP(nn.Module):
    """`down_proj(silu(gate_proj(x)))`."""

    def __init__(self, gate: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.gate_proj, self.down_proj = gate, down

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)))
        return out


def plain() -> MLP:
    torch.manual_seed(3)
    return MLP(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)).double()


def inputs() -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of the parameters and of the input `x`."""
    x = inputs().requires_grad_()
    model(x).pow(2).sum().backward()
    found = {name: whole(p.grad) for name, p in model.named_parameters()}
    assert x.grad is not None
    return {**found, "x": x.grad}


def layers(rank: int) -> dict[str, Any]:
    reference = plain()
    model = MLP(
        ColumnParallelLinear.from_linear(copy.deepcopy(reference.gate_proj)),
        RowParallelLinear.from_linear(copy.deepcopy(reference.down_proj)),
    )
    x = inputs().requires_grad_()
    expected = reference(x)
    with Collectives() as forward:
        out = model(x)
    with Collectives() as backward:
        out.sum().backward()
    model.zero_grad()
    ours, theirs = gradients(model), gradients(reference)
    state = {name: whole(value) for name, value in model.state_dict().items()}
    # Made with two arguments, all ranks have the first one's weights, whatever each has drawn.
    torch.manual_seed(rank)
    made = ColumnParallelLinear(WIDTH, HIDDEN), RowParallelLinear(HIDDEN, WIDTH)
    drawn = [whole(layer.weight) for layer in made]
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, HIDDEN).weight
    gathered = ColumnParallelLinear.from_linear(copy.deepcopy(reference.gate_proj), gather_output=True)
    return {
        "output": float((out - expected).detach().abs().max()),
        "gradients": {name: float((ours[name] - theirs[name]).abs().max()) for name in theirs},
        "live": {name: float(x.abs().max()) for name, x in theirs.items()},
        "forward": dict(forward.counts),
        "backward": dict(backward.counts),
        "state": all(torch.equal(state[name], x) for name, x in reference.state_dict().items()),
        "sizes": [x.to_local().shape for x in (made[0].weight, made[1].weight) if isinstance(x, DTensor)],
        "same draws": bool(torch.equal(drawn[0], first)),
        "gathered": float((gathered(x) - reference.gate_proj(x)).detach().abs().max()),
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_split_mlp_equals_a_whole_one(ranks: int) -> None:
    for found in run_ranks(layers, ranks):
        assert found["output"] < 1e-12
        assert min(found["live"].values()) > 1e-3
        assert max(found["gradients"].values()) < 1e-11, found["gradients"]
        assert found["gathered"] < 1e-12
        assert found["forward"] == {"allreduce": 1}
        assert found["backward"] == {"allreduce": 1}
        assert found["state"]
        assert found["same draws"]
        assert found["sizes"] == [(HIDDEN // ranks, WIDTH), (WIDTH, HIDDEN // ranks)]


def test_one_process_has_torchs_own_layers() -> None:
    torch.manual_seed(0)
    ours = ColumnParallelLinear(WIDTH, HIDDEN), RowParallelLinear(HIDDEN, WIDTH)
    torch.manual_seed(0)
    theirs = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
    pairs: list[tuple[Any, Any]] = [*zip(ours, theirs, strict=True)]
    for one, other in pairs:
        assert isinstance(one, type(other))
        assert torch.equal(one.weight, other.weight)
        assert type(one.weight) is nn.Parameter
        x = torch.randn(3, other.weight.shape[1])
        assert torch.equal(one(x), other(x))
        assert one.state_dict().keys() == other.state_dict().keys()
    assert pickle.loads(pickle.dumps(ours[0])).weight.equal(ours[0].weight)


def wrong(rank: int) -> list[str]:
    two = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    calls: list[Any] = [
        lambda: ColumnParallelLinear(4, 7),
        lambda: RowParallelLinear(7, 4),
        lambda: ColumnParallelLinear(4, 8, mesh=two),
    ]
    said = []
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_sizes_that_cannot_be_divided_are_refused() -> None:
    columns, rows, mesh = run_ranks(wrong, 2)[0]
    assert "7 output features cannot be divided among 2 ranks" in columns
    assert "ColumnParallelLinear(4, 7)" in columns
    assert "use 8 output features" in columns
    assert "7 input features cannot be divided among 2 ranks" in rows
    assert "a mesh of 2 dimensions" in mesh

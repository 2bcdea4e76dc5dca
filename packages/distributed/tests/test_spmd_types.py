"""Split layers, sequences and contexts, checked by types and without a run: no gradient is left to be added up.

`spmd_types` (Meta) gives each tensor a type for the group: R, the same on all ranks with partial gradients; I, the same
with the same gradients; V, each rank its own. It knows torch's operations; what it has to be told is what our
collectives do, below. The group is a fake one of a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import spmd_types as spmd
import spmd_types.checker
import torch
import torch.distributed as dist
from spmd_types import I, R, S, V, rules
from spmd_types.rulecheck import rulecheck
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fairlead_distributed.parallel._comm as comm
import fairlead_distributed.parallel._context as attention
import fairlead_distributed.parallel._context as sequence
import fairlead_distributed.parallel._layers as layers
import fairlead_distributed.parallel.tensor as tensor
from fairlead_distributed.parallel._local import group_of, local, read_locally
from fairlead_distributed.parallel.context import parallelize_context

RULES: dict[type[torch.autograd.Function], Callable[..., Any]] = {
    comm._Copy: lambda *, x, group: rules.convert(x, group, src=I, dst=R),
    comm._Sum: lambda *, x, group: rules.all_reduce(x, group, src=V, dst=I),
    comm._Gather: lambda *, x, dim, group, partial: rules.all_gather(x, group, src=S(dim), dst=R if partial else I),
    comm._SumAndSplit: lambda *, x, dim, group: rules.reduce_scatter(x, group, src=V, dst=S(dim)),
    comm._Split: lambda *, x, dim, group: rules.convert(x, group, src=I, dst=S(dim)),
    comm._AllToAll: lambda *, x, group: rules.reinterpret(x, group, src=V, dst=V),
    sequence._Split: lambda *, x, dim, group: rules.convert(x, group, src=I, dst=S(dim)),
    sequence._Gather: lambda *, x, dim, group: rules.all_gather(x, group, src=S(dim), dst=I),
}
"""What each collective takes and gives; the types of gradients follow from it."""


class Block(nn.Module):
    """A norm and a pair of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(self.norm(x)).tanh())
        return out


class Attention(nn.Module):
    """Causal attention with one layer for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, time, 3, -1, 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = x + self.out(y.transpose(1, 2).reshape(batch, time, -1))
        return out


class Net(nn.Module):
    """Tokens to logits."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


SPLIT = {"embedding": "vocab", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
HEADS = {"blocks.1.qkv": "packed:1,1,1", "blocks.1.out": "rowwise", "head": "vocab"}
SEQUENCE = {**SPLIT, "blocks.*.norm": "sequence", "blocks.0": "sequence_begin", "norm": "sequence_end"}


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker knows the rules."""
    for function, rule in RULES.items():
        monkeypatch.setattr(function, "spmd_typecheck", staticmethod(rule), raising=False)
        spmd.register_autograd_function(function)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which this process is the first and the other is not there."""
    dist.init_process_group("fake", rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("function", "args", "given"),
    [
        (comm._Copy, ("ranks",), I),
        (comm._Gather, (1, "ranks", True), S(1)),
        (comm._Gather, (1, "ranks", False), S(1)),
    ],
    ids=str,
)
def test_a_rule_says_what_the_collective_does(
    function: type[torch.autograd.Function], args: tuple[Any, ...], given: Any
) -> None:
    """In numbers, on two ranks in this process; sums and parts it cannot simulate: real ranks compare those."""
    x = torch.randn(3, 8, dtype=torch.float64)
    rulecheck(function, (x, *args), {"x": {"ranks": given}}, mesh={"ranks": 2}, local_tensor_mode=True)


def check_split(mesh: DeviceMesh, plan: dict[str, str], *blocks: nn.Module, **settings: Any) -> Any:
    """The type of the loss; an error where a gradient would be wrong."""
    net = Net(*blocks)
    tensor.parallelize_tensor(net, mesh, plan, **settings)
    tokens = torch.zeros(3, 8, dtype=torch.long)
    with spmd.set_current_mesh(mesh), spmd.checker.typecheck():
        spmd.assert_type(tokens, {mesh.get_group(): I})
        loss = net(tokens).square().mean()
        loss.backward()
    return spmd.get_axis_local_type(loss, mesh.get_group())


def check_context(mesh: DeviceMesh, method: Any = "allgather") -> Any:
    """The same of a module whose sequences are shared; its weights' gradients are partial, and averaged later."""
    net = Net(Attention(), Block())
    parallelize_context(net, mesh, method=method)
    tokens = torch.zeros(3, 8, dtype=torch.long)
    with spmd.set_current_mesh(mesh), spmd.checker.typecheck():
        spmd.assert_type(tokens, {mesh.get_group(): I})
        for parameter in net.parameters():
            spmd.assert_type(parameter, {mesh.get_group(): R})
        loss = net(tokens).square().mean()
        loss.backward()
    return spmd.get_axis_local_type(loss, mesh.get_group())


def test_split_layers(mesh: DeviceMesh) -> None:
    assert check_split(mesh, {**SPLIT, **HEADS}, Block(), Attention()) is I


def test_split_layers_with_split_sequences(mesh: DeviceMesh) -> None:
    assert check_split(mesh, SEQUENCE, Block(), Block(), sequence_parallel=True) is I


@pytest.mark.parametrize("method", ["allgather", "ulysses"])
def test_shared_sequences(mesh: DeviceMesh, method: str) -> None:
    assert check_context(mesh, method) is I


def test_a_bias_that_each_rank_adds(mesh: DeviceMesh) -> None:
    real = layers.Row.forward

    def forward(self: Any, input: Tensor) -> Tensor:
        bias, group = local(self.bias), group_of(self.weight)
        assert group is not None
        return real(self, input) - bias + comm.sum_over_ranks(bias, group)

    with patch.object(layers.Row, "forward", forward), pytest.raises(spmd.SpmdTypeError, match="but it is I"):
        check_split(mesh, SPLIT, Block())


def test_an_input_whose_gradient_is_not_added_up(mesh: DeviceMesh) -> None:
    with (
        patch.object(layers._Entered, "enter", lambda self, x, group, sequence: x),
        pytest.raises(spmd.SpmdTypeError, match="cannot mix with other types"),
    ):
        check_split(mesh, SPLIT, Block())


def test_norms_whose_gradients_are_those_of_a_rank(mesh: DeviceMesh) -> None:
    with (
        patch.object(tensor, "read_locally", lambda module, summed=False: read_locally(module)),
        pytest.raises(spmd.SpmdTypeError, match="cannot mix with other types"),
    ):
        check_split(mesh, SEQUENCE, Block(), Block(), sequence_parallel=True)


def test_keys_that_get_no_gradient_of_other_ranks(mesh: DeviceMesh) -> None:
    with (
        patch.object(attention, "gather_for_parts", comm.gather_for_all),
        pytest.raises(spmd.SpmdTypeError, match="cannot mix with other types"),
    ):
        check_context(mesh)

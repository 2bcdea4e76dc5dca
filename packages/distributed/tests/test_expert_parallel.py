"""Mixtures whose experts are on several ranks, against the same mixture in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fairlead.errors import ConfigError
from fairlead_distributed.parallel.context import average_gradients
from fairlead_distributed.parallel.expert import AbsentExpert, full_experts, parallelize_experts
from fairlead_distributed.testing import run_ranks
from integration_tests.models import Llama, MoE, sample_tokens, token_loss
from integration_tests.split_models import Compared, compare

WIDTH = 12


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("expert",))


class Mixed(nn.Module):
    """A mixture between two layers."""

    def __init__(self, experts: int, top_k: int, normalised: bool) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixture = MoE(WIDTH, 16, experts, top_k, normalised)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.mixture(self.before(x)))
        return out


def averaged(model: nn.Module) -> None:
    """The gradients of all parameters but the experts', over the ranks."""
    whole = nn.ParameterList(p for name, p in model.named_parameters() if ".experts." not in name)
    average_gradients(whole, mesh())


def of_all_ranks(model: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's tensors and, of the other ranks, their experts'."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return {name: x for part in parts for name, x in part.items()} | own


def mixed(top_k: int, normalised: bool, experts: int = 8, rows: int = 24) -> Compared:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 3, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randn(rows, 3, WIDTH, generator=generator, dtype=torch.float64)

    def loss(model: nn.Module) -> Tensor:
        split = any(isinstance(one, AbsentExpert) for one in model.modules())
        take = slice(dist.get_rank(), None, dist.get_world_size()) if split else slice(None)
        return F.mse_loss(model(x[take]), y[take])

    result = compare(
        Mixed(experts, top_k, normalised).double(),
        lambda model: parallelize_experts(model, mesh()),
        loss,
        after_backward=averaged,
        gather=of_all_ranks,
    )
    own = torch.tensor(result.loss, dtype=torch.float64)  # of this rank's rows against that of all
    dist.all_reduce(own)
    result.loss = float(own) / dist.get_world_size()
    return result


def mixtures(rank: int) -> dict[str, Compared]:
    return {
        "two of eight": mixed(2, True),
        "one of eight": mixed(1, False),
        "three, not normalised": mixed(3, False),
        "all of four": mixed(4, True, experts=4),
    }


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_mixture_equals_one_process(ranks: int) -> None:
    for found in run_ranks(mixtures, ranks):
        for one in found.values():
            # Backward: the tokens and their results go back; the weights' gradients send nothing.
            assert one.forward == {"alltoall_base": 3}
            assert one.backward == {"alltoall_base": 2}
            one.check()


def language_model(rank: int) -> Compared:
    torch.manual_seed(0)
    tokens = sample_tokens(batch=4)
    tokens[tokens == 0] = 1

    def loss(model: nn.Module) -> Tensor:
        split = any(isinstance(one, AbsentExpert) for one in model.modules())
        return token_loss(model, tokens[rank::2] if split else tokens)

    result = compare(
        Llama(experts=4).double(),
        lambda model: parallelize_experts(model, mesh()),
        loss,
        after_backward=averaged,
        gather=of_all_ranks,
    )
    result.loss = 0.0
    return result


def test_a_model_with_mixtures_equals_one_process() -> None:
    for found in run_ranks(language_model, 2):
        found.check()


def state(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    reference = Mixed(4, 2, True)
    torch.manual_seed(7 + rank)
    ours = Mixed(4, 2, True)
    report = parallelize_experts(ours, mesh())
    first = full_experts(ours)
    alike = first["mixture.experts.3.up_proj.weight"].clone()
    dist.broadcast(alike, 0)
    ours.load_state_dict(reference.state_dict())
    whole = {**ours.state_dict(), **full_experts(ours)}
    loaded = all(torch.equal(whole[name], x) for name, x in reference.state_dict().items())
    with pytest.raises(ConfigError, match="this expert is on rank"):
        ours.mixture.experts[3 if rank == 0 else 0](torch.ones(1, WIDTH))
    # A rank whose experts no token goes to, and a batch without tokens, take part as well.
    ours.mixture.router.weight.data.zero_()[0] = 1.0
    ours(torch.ones(2, WIDTH)).sum().backward()
    none = ours(torch.ones(0, WIDTH))
    return {
        "own": list(report.layers["mixture"]),
        "parameters": report.parameters,
        "alike": torch.equal(alike, first["mixture.experts.3.up_proj.weight"]),
        "loaded": loaded,
        "none": none.shape,
    }


def test_weights_are_kept_and_loaded() -> None:
    first, second = run_ranks(state, 2)
    assert (first["own"], second["own"]) == ([0, 1], [2, 3])
    assert "mixture.experts.2.gate_proj.bias" in second["parameters"]
    assert len(first["parameters"]) == 12
    for found in (first, second):
        assert found["alike"]
        assert found["loaded"]
        assert found["none"] == (0, WIDTH)


def in_16_bits(rank: int) -> list[bool]:
    """Whether this rank's experts train, of which one was frozen in evaluation mode."""
    for seed in range(8):
        torch.manual_seed(seed)
        mixture = MoE(WIDTH, 16, 4, 2, bool(seed % 2)).bfloat16()
        mixture.experts[2 * rank].eval()
        parallelize_experts(mixture, mesh())
        assert mixture._normalised == seed % 2
    return [mixture.experts[number].training for number in (2 * rank, 2 * rank + 1)]


def test_a_mixture_in_16_bits_is_recognised_and_its_modes_stay() -> None:
    assert run_ranks(in_16_bits, 2) == [[False, True]] * 2


class Sigmoid(MoE):
    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).sigmoid().topk(self.top_k, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out += expert(x) * ((chosen == number) * weights).sum(-1, True)
        return out


class Keeping(MoE):
    def forward(self, x: Tensor) -> Tensor:
        self.balance = self.router(x).softmax(-1).mean()
        return super().forward(x)


class Shared(MoE):
    def __init__(self) -> None:
        super().__init__(WIDTH, 8, 4, 2)
        self.shared_expert = nn.Linear(WIDTH, WIDTH)


def refusals(rank: int) -> list[str]:
    nameless = MoE(WIDTH, 8, 4, 2)
    nameless.__dict__.pop("top_k")
    said = []
    for module in (
        nn.Linear(2, 2),
        MoE(WIDTH, 8, 3, 2),
        nameless,
        Sigmoid(WIDTH, 8, 4, 2),
        Keeping(WIDTH, 8, 4, 2),
        Shared(),
    ):
        before = torch.get_rng_state()
        with pytest.raises(ConfigError) as caught:
            parallelize_experts(module, mesh())
        assert torch.equal(before, torch.get_rng_state())
        said.append(str(caught.value))
    return said


def test_what_is_no_mixture_is_refused() -> None:
    none, three, nameless, sigmoid, keeping, shared = run_ranks(refusals, 2)[0]
    assert "Linear has no mixture of experts" in none
    assert "3 experts cannot be divided among 2 ranks" in three
    assert "top_k: None" in nameless
    assert "does not compute what its parts say" in sigmoid
    assert "sets 'balance'" in keeping
    assert "'shared_expert'" in shared

"""Models split by a plan, against themselves in one process."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from examples.gpt.model import GPT
from fairlead.errors import ConfigError
from fairlead_distributed.parallel.tensor import TensorParallel, parallelize_tensor
from fairlead_distributed.testing import run_ranks
from integration_tests.models import GPT2, Encoder, Llama, sample_tokens, token_loss
from integration_tests.split_models import Compared, compare, whole

ENCODER = {
    "encoder.layers.*.linear1": "colwise",
    "encoder.layers.*.linear2": "rowwise",
    "embedding": "vocab",
    "out": "vocab",
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": Llama,
    "Llama, tied": partial(Llama, tied=True),
    "Qwen2": partial(Llama, bias=True),
    "Qwen3": partial(Llama, head_norms=True),
    "GPT-2": GPT2,
    "the example": partial(GPT, layers=2, width=32, heads=4, context=16),
    "torch.nn": Encoder,
}
CASES: dict[str, tuple[str, Mapping[str, str] | str, dict[str, bool]]] = {
    **{name: (name, "auto", {}) for name in MODELS},
    "torch.nn, by patterns": ("torch.nn", ENCODER, {}),
    "Llama, sequence": ("Llama", "auto", {"sequence_parallel": True}),
    "Qwen3, sequence": ("Qwen3", "auto", {"sequence_parallel": True}),
    "GPT-2, sequence": ("GPT-2", "auto", {"sequence_parallel": True}),
    "the example, sequence": ("the example", "auto", {"sequence_parallel": True}),
    "Llama, loss": ("Llama", "auto", {"loss_parallel": True}),
    "GPT-2, sequence and loss": ("GPT-2", "auto", {"sequence_parallel": True, "loss_parallel": True}),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))


def compared(name: str, plan: Mapping[str, str] | str, options: dict[str, Any]) -> Compared:
    def backward(loss: Tensor) -> None:
        with loss_parallel():
            loss.backward()  # type: ignore[no-untyped-call]

    def loss(model: nn.Module) -> Tensor:
        if not options.get("loss_parallel"):
            return token_loss(model, sample_tokens())
        with loss_parallel():
            return token_loss(model, sample_tokens())

    return compare(
        made(name),
        lambda model: parallelize_tensor(model, mesh(), plan, **options),
        loss,
        backward=backward if options.get("loss_parallel") else Tensor.backward,
    )


def all_cases(rank: int, titles: list[str]) -> dict[str, Compared]:
    return {title: compared(*CASES[title]) for title in titles}


@pytest.fixture(scope="module")
def cases() -> dict[str, Compared]:
    by_rank = run_ranks(all_cases, 2, list(CASES), timeout=200)
    for title in CASES:
        by_rank[1][title].check()
    return by_rank[0]


@pytest.mark.full
@pytest.mark.parametrize("title", CASES)
def test_a_split_model_equals_one_process(cases: dict[str, Compared], title: str) -> None:
    cases[title].check()


@pytest.mark.full
def test_four_ranks_equal_one_process() -> None:
    titles = ["Qwen3", "GPT-2", "Llama, sequence", "Llama, loss"]
    for one in run_ranks(all_cases, 4, titles, timeout=200):
        for title in titles:
            one[title].check()


def test_a_pair_of_layers_makes_one_all_reduce(cases: dict[str, Compared]) -> None:
    # Two blocks of attention and MLP: four pairs. q, k and v share one, as gate and up do.
    assert cases["torch.nn"].forward == {"allreduce": 2}  # its attention is whole
    assert cases["torch.nn"].backward == {"allreduce": 2}
    found = cases["the example"]
    assert (found.forward["allreduce"], found.backward["allreduce"]) == (4, 4)
    found = cases["Llama"]
    # One more for the embedding, and one for the head's input.
    assert (found.forward["allreduce"], found.backward["allreduce"]) == (4 + 1, 4 + 1)


def test_a_split_sequence_needs_no_all_reduce(cases: dict[str, Compared]) -> None:
    found = cases["Llama, sequence"]
    assert found.forward["allreduce"] == 1  # the embedding
    assert found.forward["reduce_scatter_base"] == 4


def parts(rank: int) -> dict[str, Any]:
    model = made("Llama")
    report = parallelize_tensor(model, mesh(), "auto")
    sizes = {n: (p.numel(), p.to_local().numel()) for n, p in model.named_parameters() if isinstance(p, DTensor)}
    attention: Any = model.get_submodule("layers.0.self_attn")
    return {"report": report, "sizes": sizes, "heads": (attention.num_heads, attention.num_key_value_heads)}


def test_each_rank_has_its_part() -> None:
    found = run_ranks(parts, 2)[1]
    whole_size, own = found["sizes"]["layers.0.self_attn.q_proj.weight"]
    assert own * 2 == whole_size
    assert found["sizes"]["norm.weight"] == (32, 32)
    assert len(found["sizes"]) == len(list(Llama().named_parameters()))
    assert found["heads"] == (4, 2)
    report: TensorParallel = found["report"]
    assert report.attributes["layers.0.self_attn.num_heads"] == (8, 4)
    assert report.layers["layers.1.mlp.down_proj"] == ["rowwise"]
    assert report.layers["lm_head"] == ["vocab"]


def saved(rank: int, folder: str) -> dict[str, bool]:
    model = made("GPT-2")
    other = copy.deepcopy(model)
    for p in other.parameters():
        torch.nn.init.normal_(p)
    parallelize_tensor(other, mesh(), "auto")
    other.load_state_dict(model.state_dict())
    tokens = sample_tokens()
    back = {name: whole(x) for name, x in other.state_dict().items()}
    dcp.save({"model": other.state_dict()}, checkpoint_id=folder)
    plain = {"model": {name: torch.zeros_like(x) for name, x in model.state_dict().items()}}
    dcp.load(plain, checkpoint_id=folder)
    return {
        "names": back.keys() == model.state_dict().keys(),
        "gathered": all(torch.equal(back[name], x) for name, x in model.state_dict().items()),
        "from disk": all(torch.equal(plain["model"][name], x) for name, x in model.state_dict().items()),
        "same output": torch.allclose(other(tokens), model(tokens), rtol=1e-12),
        "tied": other.get_parameter("lm_head.weight") is other.get_parameter("wte.weight"),
    }


def test_whole_weights_are_loaded_and_saved() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(saved, 2, folder)[0]
    assert all(found.values()), found


def with_fully_shard(rank: int) -> Compared:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    rows = both["shard"].get_local_rank()

    def split(model: nn.Module) -> None:
        parallelize_tensor(model, both["tensor"], "auto", sequence_parallel=True)
        for block in model.get_submodule("h").children():
            fully_shard(block, mesh=both["shard"])
        fully_shard(model, mesh=both["shard"])

    def loss(model: nn.Module) -> Tensor:
        tokens = sample_tokens(batch=4)
        tokens[tokens == 0] = 1  # each shard's mean is of as many tokens
        own = tokens if not hasattr(model, "unshard") else tokens.chunk(2)[rows]
        return token_loss(model, own)

    result = compare(made("GPT-2"), split, loss)
    result.loss = 0.0  # of other rows than the whole
    return result


@pytest.mark.full
def test_fully_shard_goes_on_top() -> None:
    for one in run_ranks(with_fully_shard, 4):
        one.check()


def refusals(rank: int) -> dict[str, str]:
    def refused(plan: Any, model: nn.Module | None = None, **options: Any) -> str:
        model = model or made("Llama")
        before = {name: type(one) for name, one in model.named_modules()}
        with pytest.raises(ConfigError) as caught:
            parallelize_tensor(model, mesh(), plan, **options)
        assert {name: type(one) for name, one in model.named_modules()} == before, "half split"
        return str(caught.value)

    odd = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 6))
    own = Llama()
    own.get_submodule("layers.0.mlp.up_proj").__class__ = type("Adapted", (nn.Linear,), {"forward": lambda self, x: x})
    strange = Llama()
    strange.get_submodule("layers.0.self_attn").inner_norm = nn.LayerNorm(8)
    mixture = nn.Module()
    mixture.first, mixture.last = nn.Identity(), nn.LayerNorm(8)
    mixture.experts = nn.ModuleList([nn.Linear(8, 8)])
    together = nn.Module()  # attention and an MLP in one module
    for name, sizes in {"qkv": (8, 24), "proj": (8, 8), "up": (8, 16), "down": (16, 8)}.items():
        together.add_module(name, nn.Linear(*sizes))
    return {
        "no match": refused({"layers.*.mlp.upp": "colwise"}),
        "no word": refused({"lm_head": "columnwise"}),
        "no linear": refused({"norm": "colwise"}),
        "no layer": refused("automatic"),
        "indivisible": refused({"0": "colwise", "2": "rowwise"}, odd),
        "heads": refused("auto", Llama(heads=8, kv_heads=1)),
        "one head": refused({"*.k_proj": "colwise"}, Llama(heads=8, kv_heads=1)),
        "vocabulary": refused({"0": "vocab"}, nn.Sequential(nn.Embedding(9, 4))),
        "max_norm": refused({"0": "vocab"}, nn.Sequential(nn.Embedding(8, 4, max_norm=1.0))),
        "tied": refused({"embed_tokens": "vocab"}, Llama(tied=True)),
        "unknown": refused("auto", nn.Sequential(nn.Linear(4, 4))),
        "strange": refused("auto", strange),
        "together": refused("auto", nn.Sequential(together)),
        "own forward": refused({"layers.0.mlp.up_proj": "colwise"}, own),
        "no edges": refused({"layers.*.mlp.up_proj": "colwise"}, sequence_parallel=True),
        "sequence": refused({"norm": "sequence"}),
        "experts": refused(
            {"first": "sequence_begin", "experts.0": "colwise", "last": "sequence_end"}, mixture, sequence_parallel=True
        ),
        "no head": refused({"layers.*.mlp.up_proj": "colwise"}, loss_parallel=True),
        "packed": refused({"0": "packed:1,2"}, nn.Sequential(nn.Linear(4, 8))),
    }


@pytest.fixture(scope="module")
def refused() -> dict[str, str]:
    return run_ranks(refusals, 2)[0]


@pytest.mark.parametrize(
    ("what", "said"),
    {
        "no match": ["'layers.*.mlp.upp' matches no module of Llama"],
        "no word": ["'columnwise' is no way to split a layer", "colwise"],
        "no linear": ["plan, norm: colwise", "RMSNorm cannot be split"],
        "no layer": ["'automatic' is no plan"],
        "indivisible": ["7 output features cannot be divided among 2 ranks", "plan, 0: colwise", "use 8"],
        "heads": ["1 heads cannot be divided among 2 ranks", "layers.0.self_attn.num_key_value_heads"],
        "one head": ["1 heads of 4 features cannot be divided among 2 ranks", "layers.0.self_attn.k_proj"],
        "vocabulary": ["9 tokens of the vocabulary cannot be divided among 2 ranks"],
        "max_norm": ["an embedding with max_norm cannot be split"],
        "tied": ["embed_tokens.weight and lm_head.weight are one parameter", "lm_head.weight: unsplit"],
        "unknown": ["no block of Sequential is known", "its linear layers are * (4 -> 4)", "colwise"],
        "strange": [
            "'inner_norm'",
            "layers.0.self_attn (LlamaAttention)",
            'plan: {"layers.*.self_attn.q_proj": colwise, "layers.*.self_attn.k_proj": colwise, ',
        ],
        "together": [
            "it is not known how 'qkv' works on a part of the features",
            "has up, down, as an MLP has, and 'qkv' beside them",
            'write the plan, where no other layer lies between them: plan: {"*.up": colwise, "*.down": rowwise}',
        ],
        "own forward": ["Adapted has a custom forward"],
        "no edges": ["does not say where the sequence is split", "sequence_begin"],
        "sequence": ["'sequence' without sequence_parallel"],
        "experts": ["'experts.0' is an expert's, and sequence_parallel splits the tokens", "leave experts unsplit"],
        "no head": ["loss_parallel needs one head whose vocabulary is split"],
        "packed": ["8 output features are not made of 2 layers in the proportions (1, 2)"],
    }.items(),
)
def test_what_cannot_be_split_is_named(refused: dict[str, str], what: str, said: list[str]) -> None:
    for text in said:
        assert text in refused[what]


class FixedHeads(nn.Module):
    """Attention whose code computes the size of a head from the width of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).unbind(2)
        return self.out(F.scaled_dot_product_attention(q, k, v).reshape(batch, time, width))  # type: ignore[no-any-return]


def misused(rank: int) -> dict[str, Any]:
    attention = FixedHeads()
    parallelize_tensor(attention, mesh(), "auto")
    with pytest.raises(RuntimeError) as caught:
        attention(torch.ones(1, 3, 16))
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Embedding(8, 4), nn.Linear(4, 8))
    parallelize_tensor(model, mesh(), {"0": "colwise", "1": "rowwise", "2": "vocab"})
    said = {}
    for name, layer, x in (
        ("row", model[1], torch.ones(2, 8)),
        ("column", model[0], torch.ones(2, 2)),
    ):
        with pytest.raises(ConfigError) as refused:
            layer(x)
        said[name] = str(refused.value)
    with pytest.raises(ConfigError) as again:
        parallelize_tensor(model, mesh(), {"3": "colwise"})
    # A weight that is split is not taken for a whole one.
    with pytest.raises(RuntimeError, match="mixed"):
        F.linear(torch.ones(2, 4), model.get_parameter("2.weight"))
    return {**said, "note": caught.value.__notes__[0], "twice": str(again.value)}


def test_what_is_misused_says_so() -> None:
    found = run_ranks(misused, 2)[0]
    assert "got 8 features, and this rank has the weights of 4" in found["row"]
    assert "4 input features got 2" in found["column"]
    assert "this rank's part of the heads" in found["note"]
    assert "'0.weight' is spread over a mesh already" in found["twice"]


def in_evaluation(rank: int) -> tuple[float, list[str]]:
    model = made("torch.nn").eval()
    ours = copy.deepcopy(model)
    report = parallelize_tensor(ours, mesh(), "auto")
    with torch.no_grad():  # where torch's fast path would read the weights of the layers
        tokens = sample_tokens()
        return float((model(tokens) - ours(tokens)).abs().max()), report.notes


def test_the_fast_path_of_evaluation_is_not_taken() -> None:
    for difference, notes in run_ranks(in_evaluation, 2):
        assert difference < 1e-12
        assert "torch.nn.MultiheadAttention" in notes[0]


def one_rank(rank: int) -> bool:
    model = made("Llama")
    before = {name: type(one) for name, one in model.named_modules()}
    report = parallelize_tensor(model, mesh(), "auto")
    assert report.ranks == 1
    return {name: type(one) for name, one in model.named_modules()} == before


def test_one_rank_changes_nothing() -> None:
    assert run_ranks(one_rank, 1) == [True]

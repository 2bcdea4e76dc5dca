"""What a plan says of jobs whose answer is known: what fits, what is first, and why."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch

from benchmarks.plan.models import Llama, Mixture, token_loss
from examples.gpt.model import GPT
from fairlead.errors import ConfigError
from fairlead_planning.devices import Machines
from fairlead_planning.job import Planned, planned_work
from fairlead_planning.layouts import Layout
from fairlead_planning.memory import MemoryModel, in_flight
from fairlead_planning.planning import Plan, plan, settings_of
from fairlead_planning.trace import Work
from fairlead_strategies.layout import Layout as Mesh

GIB = 2**30


@cache
def llama(layers: int, width: int, heads: int, hidden: int, length: int = 4096) -> Planned:
    """Of Llama's shape; on the meta device whatever its size."""
    work = Work(
        lambda: Llama(layers, width, heads, max(1, heads // 4), hidden, 32000, length),
        torch.zeros(2, length + 1, dtype=torch.long),
        token_loss,
        precision="bf16-mixed",
    )
    return planned_work(work, name="llama", steps=1000)


@cache
def gpt(layers: int, width: int) -> Planned:
    """The example, which says how it is cut into stages."""
    work = Work(
        lambda: GPT(layers=layers, width=width, heads=width // 128, context=2048),
        torch.zeros(2, 2049, dtype=torch.long),
        lambda model, batch: model.loss(batch),
        lambda model: [torch.optim.AdamW(model.parameters())],
        precision="bf16-mixed",
    )
    return planned_work(work, name="gpt")


def first(made: Plan) -> str:
    return made.best.layout.strategy


# What document C recommends, asked of the prediction.


def test_what_fits_one_gpu_is_copied() -> None:
    made = plan(llama(16, 1024, 16, 4096, 1024), "8xh100", global_batch=256)
    assert first(made) == "ddp"


def test_what_does_not_fit_one_gpu_is_sharded() -> None:
    made = plan(llama(32, 4096, 32, 11008), "8xa100", global_batch=64)
    assert first(made) == "fsdp2"
    assert not [one for one in made.found.candidates if one.layout.strategy == "ddp"]


def test_a_model_of_many_billions_is_sharded_and_what_is_copied_does_not_fit() -> None:
    made = plan(llama(40, 5120, 40, 13824), "16xh100", global_batch=64)  # 13B
    assert made.best.layout.sharding == "full" or made.best.layout.sharding == "gradients"
    assert made.best.fullest.total < 79.6 * GIB


def test_where_the_batch_is_too_small_for_the_devices_layers_or_stages_are_split() -> None:
    made = plan(gpt(12, 12288), "256xh100", global_batch=64)  # four GPUs for each sample
    mesh = made.best.layout.mesh
    assert mesh.tensor * mesh.pipeline * mesh.context >= 4
    assert first(made) == "hybrid"


def test_a_very_wide_model_is_split_by_layers_and_a_very_deep_one_can_be_cut_into_stages() -> None:
    wide = plan(gpt(2, 16384), "8xh100", global_batch=8, strategies=("ddp", "fsdp2", "hybrid"))
    assert any(one.layout.mesh.tensor > 1 for one in wide.found.candidates)
    deep = plan(gpt(32, 2048), "8xh100", global_batch=64, strategies=("hybrid",))
    assert any(one.layout.mesh.pipeline > 1 for one in deep.found.candidates)


def test_a_hundred_billion_on_few_gpus_needs_the_host() -> None:
    made = plan(llama(20, 16384, 128, 57344, 2048), "8xh100", global_batch=8)  # 70B
    assert made.found.candidates
    assert all(one.layout.offload for one in made.found.candidates)


def test_without_enough_memory_it_says_how_much_is_missing() -> None:
    made = plan(llama(32, 4096, 32, 11008), "1xl4", global_batch=1)
    with pytest.raises(ConfigError) as caught:
        _ = made.best
    assert "lacks" in str(caught.value)
    assert "GiB" in str(caught.value)


# What a plan holds to


def test_every_candidate_takes_the_whole_batch_on_all_devices() -> None:
    made = plan(llama(32, 4096, 32, 11008), "64xh100", global_batch=256)
    for one in made.found.candidates:
        assert one.layout.devices == 64
        assert one.layout.global_batch == 256
        assert one.fullest.total <= made.found.limit
        assert (
            pytest.approx(
                sum(
                    (
                        one.time.compute,
                        one.time.exposed,
                        one.time.bubble,
                        one.time.optimizer,
                        one.time.host,
                        one.time.waiting,
                    )
                )
                / one.time.seconds,
                rel=1e-6,
            )
            == 1.0
        )


def test_more_memory_or_a_faster_device_is_never_slower() -> None:
    job = llama(32, 4096, 32, 11008)
    small, large = plan(job, "16xa100-40gb", global_batch=64), plan(job, "16xa100", global_batch=64)
    assert large.best.time.seconds <= small.best.time.seconds * 1.001
    assert plan(job, "16xh100", global_batch=64).best.time.seconds < large.best.time.seconds


def test_what_is_shared_out_adds_up() -> None:
    job = llama(32, 4096, 32, 11008)
    made = plan(job, "16xh100", global_batch=64, strategies=("fsdp2",))
    use = next(one for one in made.found.candidates if one.layout.sharding == "full").fullest
    assert use.parameters * 16 == pytest.approx(4 * job.profile.parameters, rel=1e-6)
    assert use.optimizer * 16 == pytest.approx(8 * job.profile.parameters, rel=1e-3)


def test_experts_are_divided_among_ranks() -> None:
    work = Work(
        lambda: Mixture(2, 2048, 16, 8, 32000),
        torch.randint(32000, (2, 1025)),
        token_loss,
        precision="bf16-mixed",
    )
    made = plan(planned_work(work), "8xh100", global_batch=64)
    degrees = {one.layout.mesh.expert for one in made.found.candidates}
    assert {1, 2, 4, 8} <= degrees
    assert made.job.divisible.experts == 8


def test_the_stages_before_hold_more_micro_batches() -> None:
    layout = Layout("hybrid", Mesh(pipeline=4), accumulation=8)
    assert [in_flight(layout, rank) for rank in range(4)] == [4, 3, 2, 1]
    made = plan(gpt(12, 12288), "256xh100", global_batch=512, strategies=("hybrid",))
    one = next(one for one in made.found.candidates if one.layout.mesh.pipeline == 4)
    assert not [one for one in made.found.candidates if one.layout.mesh.pipeline > 1 and one.layout.sequence]
    assert one.memory[1].activations > one.memory[2].activations


def test_settings_and_json_say_the_same_layout() -> None:
    made = plan(llama(32, 4096, 32, 11008), "16xh100", global_batch=64)
    document = json.loads(json.dumps(made.to_dict()))
    best = document["layouts"][0]
    settings = settings_of(made.best.layout, made)
    assert best["settings"] == json.loads(json.dumps(settings))
    assert settings["data.args.batch_size"] * settings["trainer.accumulate_grad_batches"] * 16 == 64
    assert (settings["trainer.devices"], settings["trainer.num_nodes"]) == (8, 2)
    assert document["parameters"] == made.job.profile.parameters
    assert best["time"]["seconds"] == made.best.time.seconds
    assert document["goodput"]["effective"] > 0.9


def test_the_page_says_what_takes_the_time_and_why_others_are_slower() -> None:
    text = "\n".join(plan(llama(32, 4096, 32, 11008), "16xh100", global_batch=64).lines(3))
    for words in ("parameters, bf16-mixed, on 16 x h100", "1. ", "fastest of", "slower:", "memory", "to the end"):
        assert words in text


def test_parameters_and_adams_states_are_said_in_gigabytes() -> None:
    work = Work(
        lambda: torch.nn.Linear(20000, 25000, bias=False), torch.zeros(2, 20000), lambda model, x: model(x).sum()
    )
    text = "\n".join(plan(work, "8xh100", global_batch=16).lines())
    assert "parameters 2.0 GB, states of the optimizer 4.0 GB" in text  # numel x 4 bytes, and twice that


def test_each_stage_of_zero_shares_out_more() -> None:
    job, ranks = llama(16, 1024, 16, 4096, 1024), 8
    whole = MemoryModel(job.profile, job.wider, "cpu").use(Layout("ddp", Mesh(replicate=ranks)))[0]
    found = []
    for stage, sharding in enumerate(("optimizer", "gradients", "full"), 1):
        layout = Layout(f"deepspeed_stage_{stage}", Mesh(shard=ranks), sharding=sharding, bucket=0)  # type: ignore[arg-type]
        found.append(MemoryModel(job.profile, job.wider, "cpu").use(layout)[0])
    states = whole.optimizer / ranks + whole.parameters / ranks  # and the part of the parameters that is updated
    assert [one.optimizer for one in found] == pytest.approx([states] * 3, rel=1e-6)
    assert all(one.gradients < 0.2 * whole.gradients for one in found)
    assert [one.parameters for one in found] == pytest.approx(
        [whole.parameters, whole.parameters, whole.parameters / ranks], rel=1e-6
    )


@pytest.mark.parametrize(
    ("text", "nodes", "count"), [("64xh100", None, (64, 8)), ("8 x A100-40GB", 4, (32, 4)), ("4xh100", None, (4, 1))]
)
def test_machines_by_words(text: str, nodes: int | None, count: tuple[int, int]) -> None:
    found = Machines.of(text, nodes=nodes)
    assert (found.count, found.nodes) == count


@pytest.mark.parametrize("text", ["h100", "0xh100", "8xh900", "x", "-1xh100", "12xh100"])
def test_machines_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Machines.of(text)
    assert "do:" in str(caught.value)

"""How long a step takes: what each choice of a layout changes, and that a calibration of one's own counts."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairlead.errors import ConfigError
from fairlead_planning.calibration import from_file, shipped
from fairlead_planning.devices import Cluster, device_facts
from fairlead_planning.layouts import Layout
from fairlead_planning.profile import Profile
from fairlead_planning.step_time import StepTimer, step_time
from fairlead_planning.trace import Work, trace
from fairlead_planning.variants import checkpointed
from fairlead_runs.pipeline_schedule import bubble_fraction
from fairlead_strategies.layout import Layout as Mesh

H100 = Cluster.of("h100")
WIDTH, LENGTH, LAYERS = 2048, 2048, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(rows, length, 3, 16, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, -1))
        done: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return done


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32000, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 32000, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


@cache
def profile(rows: int = 4) -> Profile:
    plan: dict[str, str] = {}
    for number in range(LAYERS):
        plan |= {f"blocks.{number}.{name}": "colwise" for name in ("qkv", "up")}
        plan |= {f"blocks.{number}.{name}": "rowwise" for name in ("out", "down")}
    tokens = torch.zeros(rows, LENGTH, dtype=torch.long)
    return trace(Work(Model, tokens, lambda model, batch: model(batch), precision="bf16-cast", plan=lambda model: plan))


def layout(**sizes: Any) -> Layout:
    mesh = {name: sizes.pop(name) for name in list(sizes) if name in Mesh.__dataclass_fields__}
    return Layout("hybrid", Mesh(**mesh), **{"micro_batch": 4, "sharding": "full", "cast": True, **sizes})


@cache
def timer(**options: Any) -> StepTimer:
    return StepTimer(profile(), H100, **options)


def test_the_terms_are_the_whole_and_the_speed_follows_from_it() -> None:
    one = layout(shard=16, pipeline=2, accumulation=4)
    time = timer().time(one)
    parts = (time.compute, time.exposed, time.bubble, time.optimizer, time.host, time.waiting)
    assert sum(parts) == pytest.approx(time.seconds)
    assert min(parts) >= 0
    assert time.tokens_per_second == pytest.approx(one.global_batch * LENGTH / time.seconds / one.devices)
    assert 0.1 < time.mfu < 0.8
    assert time.tflops == pytest.approx(time.mfu * 989)
    assert time.joules == pytest.approx(time.seconds * 32 * 700)


def test_a_step_of_a_device_alone_grows_with_its_micro_batches() -> None:
    """By a constant for each further one; larger ones are as fast as many small ones, and no slower."""
    few, more, most = (timer().time(layout(accumulation=n)).seconds for n in (1, 2, 3))
    assert most - more == pytest.approx(more - few)
    large = StepTimer(profile(8), H100).time(layout(micro_batch=8)).seconds
    assert few < large < 1.03 * more
    assert timer().time(layout(micro_batch=8)).seconds == pytest.approx(large, rel=0.02)


def test_computing_again_is_named_and_costs_less_than_a_forward_pass() -> None:
    plain, full = (StepTimer(checkpointed(profile(), mode), H100).time(layout()) for mode in ("none", "full"))
    assert plain.recomputation == 0
    assert full.compute == pytest.approx(plain.compute + full.recomputation)
    assert 0.15 * plain.compute < full.recomputation < plain.compute / 3
    assert full.tflops < plain.tflops


def test_tensor_parallelism_divides_products_and_pays_in_communication() -> None:
    alone, split = (timer().time(layout(tensor=n, sequence=n > 1)) for n in (1, 8))
    assert alone.compute / 8 < split.compute < alone.compute / 2.5, "all but embedding and head"
    assert alone.communication == {}
    assert split.communication["tensor"] > 0.1 * split.compute
    across = StepTimer(profile(), Cluster.of("h100", "ethernet 100")).time(layout(tensor=16, sequence=True))
    assert across.communication["tensor"] > 10 * split.communication["tensor"]


def test_a_pipeline_waits_as_its_schedule_says() -> None:
    base = layout(pipeline=4, accumulation=8, sharding="none", schedule="1f1b")
    found = timer().time(base)
    plenty = timer().time(replace(base, accumulation=64))
    laps = timer().time(replace(base, schedule="interleaved_1f1b", stages_per_rank=2))
    empty = bubble_fraction(4, 8)
    mean = found.bubble * (1 - empty) / empty
    assert 0.7 * found.compute < mean <= found.compute, (
        "stages are not of equal length: the slowest computes, the mean waits"
    )
    assert plenty.bubble == pytest.approx(found.bubble)
    assert laps.bubble < 0.6 * found.bubble


def test_gathers_are_hidden_within_a_node_and_not_over_a_slow_network() -> None:
    near = timer().time(layout(shard=8))
    slow = StepTimer(profile(), Cluster.of("h100", "ethernet 25")).time(layout(shard=64))
    assert near.communication["data"] < 0.15 * near.seconds
    assert slow.communication["data"] > 0.5 * slow.seconds
    whole = timer().time(layout(shard=8, one_unit=True))
    assert whole.communication["data"] > 1.5 * near.communication["data"], "one unit hides nothing"
    wide = timer().time(layout(shard=8, cast=False))
    assert wide.communication["data"] > near.communication["data"], "parameters in 32 bits are gathered"


def test_a_faster_device_and_a_narrower_format_are_faster_but_not_by_their_peaks() -> None:
    a100 = StepTimer(profile(), Cluster.of("a100")).time(layout())
    assert 1.3 < a100.seconds / timer().time(layout()).seconds < 989 / 312
    low = timer(products="float8").time(layout())
    assert 1.05 < timer().time(layout()).seconds / low.seconds < 2
    assert low.mfu < timer().time(layout()).mfu


def test_what_compile_fuses_is_not_read_again() -> None:
    eager, fused = (timer(stack=name).time(layout()) for name in ("eager", "compile"))
    assert fused.compute < eager.compute


def test_the_host_is_what_a_small_model_waits_for() -> None:
    small = trace(
        Work(
            lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(20))),
            torch.zeros(4, 64),
            lambda model, batch: model(batch).sum(),
        )
    )
    time = step_time(small, layout(sharding="none"), H100)
    assert time.host > time.compute


def test_an_optimizer_is_divided_by_shards_and_slow_on_the_host() -> None:
    whole, shards, host = (
        timer().time(layout(**options)).optimizer
        for options in (
            {"replicate": 8, "sharding": "none"},
            {"shard": 8, "sharding": "optimizer"},
            {"shard": 8, "sharding": "optimizer", "offload": True},
        )
    )
    assert whole == pytest.approx(8 * shards)
    assert host > 20 * shards


def test_the_second_stage_of_zero_gathers_once_and_reduces_in_each_micro_batch() -> None:
    slow = StepTimer(profile(), Cluster.of("h100", "ethernet 100"))

    def data(stage: int, sharding: str, accumulation: int) -> float:
        one = layout(shard=16, accumulation=accumulation, sharding=sharding)
        return slow.time(replace(one, strategy=f"deepspeed_stage_{stage}")).communication["data"]

    one, two, four = (data(2, "gradients", n) for n in (1, 2, 4))
    assert one == pytest.approx(data(1, "optimizer", 1)) == pytest.approx(data(1, "optimizer", 4))
    assert four - two == pytest.approx(2 * (two - one))
    assert two - one < 0.7 * one, "gradients without parameters"


def test_an_unknown_stack_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean 'compile'"):
        StepTimer(profile(), H100, stack="compiled")


def measured(**changes: Any) -> dict[str, Any]:
    return {
        "device": "NVIDIA H100 80GB HBM3",
        "source": "fairlead bench gemm",
        "date": "2026-11-27",
        "matmul": [
            {"dtype": "bfloat16", "m": size, "n": size, "k": size, "tflops": 300 * size / (size + 500)}
            for size in (512, 1024, 2048, 4096, 8192, 16384)
        ],
        "attention": [{"pass": name, "tflops": 200.0} for name in ("forward", "backward")],
        "memory": [{"bytes": 2**30, "gb_s": 2000.0}],
        "launch_us": 9.0,
        **changes,
    }


def test_what_was_measured_on_a_cluster_goes_before_the_shipped_numbers(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(measured()), encoding="utf-8")
    found = from_file(file, device_facts("h100"))
    assert found.stack("eager").launch_us == 9.0
    assert found.memory_fraction(device_facts("h100")) == pytest.approx(2000 / 3350)
    reached = found.fraction("matmul", "bfloat16", device_facts("h100"), found.stack("eager"), backward=False)
    assert reached == pytest.approx(300 / 989, rel=0.15)
    assert shipped().numbers["depth"] != found.numbers["depth"]
    slower = StepTimer(profile(), H100, calibration=found).time(layout())
    assert slower.seconds > 1.5 * timer().time(layout()).seconds
    assert timer().calibrated(found).time(layout()) == slower


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (json.dumps(measured(device="NVIDIA A100-SXM4-40GB")), "was measured on a100 40gb, and the plan is for h100"),
        ("{", "is no calibration"),
        ("[]", "is no calibration"),
        ("{}", "is no calibration"),
    ],
)
def test_a_file_of_another_device_or_none_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        from_file(file, device_facts("h100"))


def test_context_parallelism_divides_attention_evenly_unless_it_is_a_ring_of_consecutive_positions() -> None:
    one = layout(context=8, shard=1)
    even, ring = (StepTimer(profile(), H100, ring=value).time(one) for value in (False, True))
    assert even.communication["context"] == ring.communication["context"] > 0
    assert even.compute < ring.compute < 1.8 * even.compute
    assert even.compute < timer().time(layout()).compute / 4

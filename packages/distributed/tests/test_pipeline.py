"""Pipelines in a loop of one's own, on real processes: schedules, gradient scale, memory, and where layers are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fairlead.engines import too_old
from fairlead.errors import ConfigError
from fairlead_distributed.parallel.pipeline import (
    Pipeline,
    PipelineStage,
    clip_grad_norm_over_stages,
    layer_costs,
    split_at,
    split_by_cost,
    split_by_counts,
)
from fairlead_distributed.testing import run_ranks
from fairlead_runs.pipeline_schedule import SCHEDULES, Schedule, bubble_fraction, choose_micro_batches, stage_rank

OLD = too_old("pipeline")
pytestmark = pytest.mark.skipif(OLD is not None, reason=str(OLD))
IGNORED = -100


class Two(nn.Module):
    """Gives two tensors of other shapes and number formats than it takes."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.linear = nn.Linear(wide, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.linear(x)
        return out[:, :4].to(torch.float64), out[:, 4:].t().contiguous().t()  # one of them with gaps


class One(nn.Module):
    """Takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 7)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.linear(torch.cat((a.to(b.dtype), b), 1))
        return out


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(6, 12), nn.Tanh()),
        Two(12),
        One(),
        nn.Sequential(nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3)),
    ]


def batch(rows: int = 16, seed: int = 1) -> tuple[Tensor, Tensor]:
    """The first rows count little: a mean over micro-batches is not the mean over what counts."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)
    y[: rows // 2 - 1] = IGNORED
    return x, y


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, ignore_index=IGNORED)


def counted(target: Tensor) -> Tensor:
    return (target != IGNORED).sum()


def on_rank(rank: int, ranks: int, schedule: Schedule, **kwargs: Any) -> tuple[Pipeline, list[nn.Module], list[int]]:
    """This rank's pipeline, all layers of its model, and which of them are its own."""
    per_rank = SCHEDULES[schedule].stages_per_rank[0]
    stages = ranks * per_rank
    made, parts = layers(), split_by_counts(4, [4 // stages] * stages, stages)
    own = [s for s in range(stages) if stage_rank(s, stages, ranks, schedule) == rank]
    mine = [PipelineStage([made[i] for i in parts[s]], "cpu") for s in own]
    options: dict[str, Any] = {"loss": loss, "weight": counted, "schedule": schedule, **kwargs}
    return Pipeline(mine, **options), made, [i for s in own for i in parts[s]]


def apart(made: list[nn.Module], own: list[int], reference: list[nn.Module]) -> float:
    pairs = [(a, b) for i in own for a, b in zip(made[i].parameters(), reference[i].parameters(), strict=True)]
    assert all(b.grad is not None and float(b.grad.abs().max()) > 0 for _, b in pairs)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs)  # type: ignore[operator]


def all_schedules(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for schedule in SCHEDULES:
        for micro_batches in (8, 4, 1):
            pipeline, made, own = on_rank(rank, 2, schedule, micro_batches=micro_batches)
            reference = layers()
            whole = nn.Sequential(reference[0], reference[1])
            values = []
            for rows, seed in ((16, 1), (6, 2), (16, 3)):  # accumulated over batches of other sizes
                x, y = batch(rows, seed)
                ours = pipeline.step(x, target=y)
                theirs = loss(reference[3](reference[2](*whole(x))), y)
                theirs.backward()  # type: ignore[no-untyped-call]
                values.append(float(ours - theirs.detach()))
            with torch.no_grad():
                forward = float((pipeline.forward(x) - reference[3](reference[2](*whole(x)))).abs().max())
            found[f"{schedule}/{micro_batches}"] = {
                "loss": max(map(abs, values)),
                "gradients": apart(made, own, reference),
                "forward": forward,
                "alive": pipeline.most_alive,
            }
    return found


@pytest.fixture(scope="module")
def scheduled() -> list[dict[str, Any]]:
    return run_ranks(all_schedules, 2, timeout=120)


@pytest.mark.full
@pytest.mark.parametrize("micro_batches", [8, 4, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_loss_and_gradients_are_those_of_one_process(
    scheduled: list[dict[str, Any]], schedule: str, micro_batches: int
) -> None:
    """Accumulated over batches of several sizes, with other shapes and formats between the layers, on both ranks."""
    for rank in scheduled:
        found = rank[f"{schedule}/{micro_batches}"]
        assert max(found["loss"], found["gradients"], found["forward"]) < 2e-6


def test_gpipe_keeps_all_micro_batches_and_1f1b_as_many_as_there_are_stages(scheduled: list[dict[str, Any]]) -> None:
    """Counted while they are alive, by rank."""
    assert [rank["gpipe/8"]["alive"] for rank in scheduled] == [[8], [8]]
    assert [rank["1f1b/8"]["alive"] for rank in scheduled] == [[2], [1]]


class Sixteen(nn.Module):
    """Gives many tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x * i for i in range(16))


class Sum(nn.Module):
    """Takes them."""

    def forward(self, *given: Tensor) -> Tensor:
        return torch.stack(given).sum(0)


def many_tensors(rank: int) -> list[float]:
    stage = PipelineStage([(Sixteen(), Sum())[rank]], "cpu")
    out: Tensor = Pipeline([stage], loss=nn.functional.mse_loss, micro_batches=2).forward(torch.ones(4, 3))
    return out.flatten().tolist()


def test_a_validation_passes_on_any_number_of_tensors() -> None:
    assert run_ranks(many_tensors, 2) == [[120.0] * 12] * 2


def faults(rank: int) -> dict[str, float]:
    """How far gradients are off with each of the faults that others have published."""
    found = {}
    for name in ("right", "by rows", "summed", "moving average", "only the last"):
        pipeline, made, own = on_rank(rank, 2, "1f1b", micro_batches=4, check_loss=False)
        if name == "by rows":
            pipeline._weight = None
        if name == "summed":
            pipeline._share = lambda total: 1.0  # type: ignore[method-assign]
        reference = layers()
        for seed in (1, 2):
            x, y = batch(seed=seed)
            if name == "only the last":
                for parameter in pipeline.parameters:
                    parameter.grad = None
            if name == "moving average":
                for parameter in pipeline.parameters:
                    if parameter.grad is not None:
                        parameter.grad /= 4  # what torch's `scale_grads=True` does to what was accumulated
            pipeline.step(x, target=y)
            loss(reference[3](reference[2](*reference[1](reference[0](x)))), y).backward()  # type: ignore[no-untyped-call]
        found[name] = apart(made, own, reference)
    return found


def test_each_published_fault_of_scale_would_be_seen() -> None:
    for found in run_ranks(faults, 2):
        assert found.pop("right") < 2e-6
        assert min(found.values()) > 1e-3, found


def clipped(rank: int) -> tuple[float, float, float]:
    pipeline, made, own = on_rank(rank, 2, "1f1b", micro_batches=4)
    reference = layers()
    x, y = batch()
    pipeline.step(x, target=y)
    loss(reference[3](reference[2](*reference[1](reference[0](x)))), y).backward()  # type: ignore[no-untyped-call]
    theirs = nn.utils.clip_grad_norm_([p for one in reference for p in one.parameters()], 0.01)
    ours = clip_grad_norm_over_stages(pipeline.parameters, 0.01, group=None)
    worst = apart(made, own, reference)
    largest = clip_grad_norm_over_stages(pipeline.parameters, 1.0, float("inf"), group=None)
    expected = max(float(p.grad.abs().max()) for one in reference for p in one.parameters() if p.grad is not None)
    return float(ours - theirs), worst, float(largest) - expected


def test_gradients_are_clipped_by_the_norm_over_all_stages() -> None:
    assert all(max(map(abs, found)) < 1e-6 for found in run_ranks(clipped, 2))


def refusals(rank: int) -> list[str]:
    said = []
    for weight, seed in ((None, 1), (counted, rank)):
        pipeline, _, _ = on_rank(rank, 2, "1f1b", micro_batches=4, weight=weight)
        x, y = batch(seed=seed)
        try:
            pipeline.step(x, target=y)
        except ConfigError as error:
            said.append(str(error))
    return said


def test_a_wrong_weight_and_other_batches_are_found_at_the_first_step() -> None:
    for said in run_ranks(refusals, 2):
        assert "do not make the loss of the full batch" in said[0]
        assert "different batches" in said[1]


def test_a_loss_is_one_number() -> None:
    pipeline = Pipeline([nn.Linear(2, 2)], loss=lambda out, target: out - target, micro_batches=1)
    with pytest.raises(ConfigError, match=r"a tensor of shape \(4, 2\), not one number"):
        pipeline.step(torch.ones(4, 2), target=torch.ones(4, 2))


def test_stages_in_one_process_are_the_model() -> None:
    """Composed by hand, and as a pipeline."""
    whole = [nn.Linear(4, 4) for _ in range(6)]
    stages = [PipelineStage(layers=whole[a:b], device="cpu") for a, b in ((0, 2), (2, 4), (4, 6))]
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    out = x
    for stage in stages:
        out = stage(out)
    assert torch.equal(out, nn.Sequential(*whole)(x))
    nn.functional.mse_loss(out, y).backward()  # type: ignore[no-untyped-call]
    expected = [p.grad.clone() for layer in whole for p in layer.parameters() if p.grad is not None]
    for layer in whole:
        layer.zero_grad()
    pipeline = Pipeline(stages, loss=nn.functional.mse_loss, micro_batches=4)
    found = pipeline.step(x, target=y)
    assert torch.allclose(found, nn.functional.mse_loss(out, y).detach())
    for parameter, gradient in zip(pipeline.parameters, expected, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)


@pytest.mark.parametrize(("bad", "words"), [([], "without layers"), ([3], "layer 0 of a pipeline stage is a int")])
def test_a_stage_wants_modules(bad: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PipelineStage(bad)


def test_layers_are_cut_by_numbers_names_and_cost() -> None:
    assert [len(part) for part in split_by_counts(30, [8, 8, 8], 4)] == [8, 8, 8, 6]
    assert split_at(["a", "b", "c"], ["a", "c"], 2) == [range(2), range(2, 3)]
    assert [len(p) for p in split_by_cost([1.0] * 32, 4, first_stage_less_layers=1, last_stage_less_layers=3)] == [
        8,
        9,
        9,
        6,
    ]
    assert split_by_cost([10, 1, 1, 1, 1], 2) == [range(1), range(1, 5)]
    assert layer_costs([nn.Linear(3, 2), nn.Tanh()]) == [8.0, 1.0]


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (lambda: split_by_counts(10, [8, 8], 2), "8 [+] 8 layers do not make 2 stages of a model of 10 layers"),
        (lambda: split_by_cost([1.0] * 3, 4), "3 layers cannot be split into 4 stages"),
        (lambda: split_at(["a", "b"], ["z"], 2), "no layer of the pipeline is called 'z'"),
        (lambda: split_at(["a", "b", "c"], ["c", "b"], 3), "3 stages begin at"),
    ],
)
def test_a_cut_that_does_not_fit_is_refused_with_numbers(cut: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cut()


def test_the_bubble_is_the_share_of_a_step_in_which_ranks_wait() -> None:
    """Of GPipe and 1F1B; with several stages a rank, the first micro-batch is through sooner."""
    assert bubble_fraction(4, 12) == pytest.approx(3 / 15)
    assert bubble_fraction(2, 8) == pytest.approx(1 / 9)
    assert bubble_fraction(4, 12, stages_per_rank=2) == pytest.approx(3 / 27)


def test_a_batch_is_cut_into_what_divides_it_and_the_schedule_takes() -> None:
    assert choose_micro_batches("1f1b", 48, ranks=4) == 16
    assert choose_micro_batches("1f1b", 7, ranks=2, requested=4) == 1
    assert choose_micro_batches("interleaved_1f1b", 9, ranks=4, requested=9) == 3  # 9 would be two rounds of 4.5

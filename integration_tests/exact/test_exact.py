"""Runs that are killed and started again end bit for bit as ones that were never disturbed.

Every job, number of ranks and workers and every phase once; `nox -s exact` tries a hundred random moments.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from integration_tests.exact.cases import Case, Starter, cold
from integration_tests.exact.compare import differences
from integration_tests.exact.disturb import Kill, disturbed
from integration_tests.exact.references import References

pytestmark = [pytest.mark.slow, pytest.mark.full]

WARM = [
    (Case("mlp"), [Kill("start-up", part=0.6), Kill("step", "one", part=0.4)]),
    (Case("mlp", ranks=4), [Kill("retention", "one", part=0.3, rank=3)]),
    (Case("conv", ranks=2, workers=2), [Kill("validation", part=0.3), Kill("step", "one", part=0.8, fine=0.5, rank=1)]),
    (Case("gpt", workers=2), [Kill("save", part=0.5, fine=0.2)]),
    (Case("gpt", ranks=4), [Kill("validation", "one", part=0.4, rank=1)]),
    (Case("metrics", workers=2), [Kill("step", part=0.3, fine=0.5), Kill("validation", "one", part=0.6, fine=0.7)]),
]


@pytest.mark.parametrize(("case", "kills"), WARM, ids=lambda value: str(value) if isinstance(value, Case) else "")
def test_killed_runs_end_as_if_nothing_had_happened(
    case: Case, kills: list[Kill], warm_starter: Starter, references: References, tmp_path: Path
) -> None:
    """Weights, optimizer, loops, callbacks, RNG of each rank, metrics.csv, TensorBoard, the best checkpoints."""
    reference = references.of(case)
    fell = disturbed(case, tmp_path, warm_starter, kills, seconds=reference.seconds, steps=reference.steps)
    assert fell, "no start lived long enough to be killed"
    found = differences(reference.run, case.directory(tmp_path))
    assert not found, "\n".join([f"killed in {fell}, and then:", *found])


def test_fairlead_fit_of_which_a_rank_is_killed(references: References, tmp_path: Path) -> None:
    """As a user starts it, with its supervisor; the undisturbed run was started in another way, and is the same."""
    case = Case("metrics", ranks=2)
    reference = references.of(case)
    kills = [Kill("step", "one", part=0.4, fine=0.5, rank=1)]
    fell = disturbed(case, tmp_path, cold, kills, seconds=reference.seconds, steps=reference.steps)
    assert fell, "no start lived long enough to be killed"
    found = differences(reference.run, case.directory(tmp_path))
    assert not found, "\n".join([f"killed in {fell}, and then:", *found])


def test_a_difference_is_found(references: References, tmp_path: Path) -> None:
    """One bit of a weight, of an optimizer's state, of a rank's generator; a line of metrics.csv; a point too many."""
    case = Case("mlp")
    reference = references.of(case)

    def altered(name: str) -> Path:
        shutil.copytree(reference.cwd, tmp_path / name)
        return case.directory(tmp_path / name)

    run = altered("same")
    assert differences(reference.run, run) == []

    final = f"checkpoints/step-{reference.steps:08d}"
    run = altered("weight")
    state = torch.load(run / final / "state.ckpt", weights_only=False)
    state["state_dict"]["first.bias"].view(torch.int32)[3] ^= 1
    torch.save(state, run / final / "state.ckpt")
    (found,) = differences(reference.run, run)
    assert "['state_dict']['first.bias']: 1 of 48 elements differ" in found
    assert "element 3" in found

    run = altered("optimizer")
    state = torch.load(run / final / "state.ckpt", weights_only=False)
    state["optimizer_states"][0]["state"][0]["exp_avg_sq"].view(torch.int32)[0] ^= 1
    torch.save(state, run / final / "state.ckpt")
    (found,) = differences(reference.run, run)
    assert "['exp_avg_sq']" in found

    run = altered("generator")
    state = torch.load(run / final / "rank-00000.pt", weights_only=False)
    state["rng"]["torch"][0] ^= 1
    torch.save(state, run / final / "rank-00000.pt")
    (found,) = differences(reference.run, run)
    assert "rank-00000.pt['rng']['torch']" in found

    run = altered("metrics")
    lines = (run / "metrics.csv").read_text().splitlines(keepends=True)
    (run / "metrics.csv").write_text("".join(lines[:2] + lines[3:]))
    assert "metrics.csv line 3" in differences(reference.run, run)[0]

    run = altered("events")
    (events,) = (run / "tensorboard").rglob("events.out.tfevents.*")
    shutil.copy(events, events.with_name("events.out.tfevents.9999999999.again"))
    assert "too many" in differences(reference.run, run)[0]

    run = altered("checkpoints")
    oldest = min(path for path in (run / "checkpoints").iterdir() if path.name.startswith("step-"))
    shutil.rmtree(oldest)
    assert any("checkpoints: of steps" in line for line in differences(reference.run, run))

"""`fairlead checkpoint diff`: which tensors differ, and by how much."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import Command

from fairlead_checkpoint_io.commands.diff import compare
from fairlead_runs.commit import publish, stage


def save(path: Path, **entries: Any) -> Path:
    torch.save({"state_dict": {"w": torch.arange(4.0), "n": torch.tensor([3])}, "step": 1, **entries}, path)
    return path


def test_equal_checkpoints(fairlead: Command, tmp_path: Path) -> None:
    nan = {"w": torch.tensor([math.nan, 1.0, -0.0])}
    a, b = (save(tmp_path / name, state_dict=nan, score=math.nan, empty={}) for name in ("a", "b"))
    said = fairlead("diff", a, b)
    assert (said.code, said.out) == (0, "equal in every bit: 4 tensors and values\n")
    assert fairlead("diff", a, b, "--json").document["equal"] is True


def test_each_kind_of_difference_has_its_words(fairlead: Command, tmp_path: Path) -> None:
    first = {"w": torch.arange(4.0), "shape": torch.ones(2), "dtype": torch.ones(2), "gone": torch.ones(1)}
    other = {"w": torch.arange(4.0), "shape": torch.ones(3), "dtype": torch.ones(2).double(), "new": torch.ones(1)}
    other["w"][2] = 2.5
    a = save(tmp_path / "a", state_dict=first, step=1, names=["x"], flag=True)
    b = save(tmp_path / "b", state_dict=other, step=2, names=["x", "y"], flag=1)
    said = fairlead("diff", a, b, "--json")
    found = {item["name"]: item for item in said.document["differences"]}
    assert said.code == 1
    assert {name: item["kind"] for name, item in found.items()} == {
        "state_dict.w": "values",
        "state_dict.shape": "shape",
        "state_dict.dtype": "dtype",
        "state_dict.gone": "only in a",
        "state_dict.new": "only in b",
        "step": "value",
        "names": "value",
        "flag": "value",
    }
    numbers = {key: found["state_dict.w"][key] for key in ("differing", "of", "max_abs", "max_rel")}
    assert numbers == {"differing": 1, "of": 4, "max_abs": 0.5, "max_rel": 0.2}
    text = fairlead("diff", a, b).out
    assert "state_dict.w" in text
    assert "1 of 4 elements, float32 [4]" in text
    assert "only in B: float32 [1]" in text
    assert "8 differ, 0 are equal" in text


def test_a_bit_in_any_place_is_found(fairlead: Command, tmp_path: Path) -> None:
    large = torch.zeros(5_000_000)
    a = save(tmp_path / "a", state_dict={"w": large})
    large[4_500_000] = -0.0
    b = save(tmp_path / "b", state_dict={"w": large})
    (item,) = fairlead("diff", a, b, "--json").document["differences"]
    assert (item["differing"], item["max_abs"]) == (1, 0.0)


def test_the_ranks_own_parts_count_between_runs_only(fairlead: Command, tmp_path: Path) -> None:
    for step, seed in ((1, 5), (2, 6)):
        staged = stage(tmp_path / "checkpoints", f"step-{step:08d}", token="s1")
        save(staged / "state.ckpt")
        torch.save({"rng": torch.tensor([seed])}, staged / "rank-00000.pt")
        publish(staged, {"step": step, "start": 1})
    a, b = (tmp_path / "checkpoints" / f"step-{step:08d}" for step in (1, 2))
    (item,) = fairlead("diff", a, b, "--json").document["differences"]
    assert item["name"] == "rank-00000.rng"
    said = fairlead("diff", a, b / "state.ckpt")
    assert said.code == 0
    assert "without the ranks' own parts" in said.out
    assert fairlead("diff", a, b, "--weights").code == 0


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
        *(torch.complex64, torch.int64, torch.uint8, torch.bool),
    ],
    ids=str,
)
def test_every_dtype_is_compared(dtype: torch.dtype) -> None:
    a = torch.tensor([0, 1, 1, 0]).to(dtype)
    b = torch.tensor([0, 1, 0, 1]).to(dtype)
    assert compare(a, a.clone()) is None
    found = compare(a, b)
    assert found is not None
    assert (found.differing, found.max_abs, found.max_rel) == (2, 1.0, 1.0)


def test_infinities_and_nan_are_infinitely_far() -> None:
    for first, other in ((math.inf, 1.0), (math.nan, 1.0), (math.inf, -math.inf)):
        found = compare(torch.tensor([first]), torch.tensor([other]))
        assert found is not None
        assert found.max_abs == math.inf


def test_large_integers_are_not_rounded() -> None:
    found = compare(torch.tensor([(1 << 62) + 1]), torch.tensor([1 << 62]))
    assert found is not None
    assert found.max_abs == 1.0

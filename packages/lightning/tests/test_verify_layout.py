"""A layout in a small world keeps its kinds; the page of a verdict."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fairlead.checks import check_trainer
from fairlead.config import TrainerConfig
from fairlead.errors import ConfigError
from fairlead.plugins import default_plugins
from fairlead_lightning.verify.layout import Layout, layouts_of
from fairlead_lightning.verify.text import page


def small(full: bool = False, **trainer: Any) -> Layout:
    return sizes(full=full, **trainer)[0]


def sizes(full: bool = False, **trainer: Any) -> list[Layout]:
    config = TrainerConfig.model_validate({"accelerator": "cpu", **trainer})
    resolution, _ = check_trainer(config, environ={"PATH": os.environ["PATH"]}, plugins=default_plugins())
    return layouts_of(resolution, full=full)


@pytest.mark.parametrize(
    ("devices", "strategy", "ranks", "changed"),
    [
        (64, "ddp", 2, None),
        (2, "ddp", 2, None),
        (8, "deepspeed_stage_3", 2, None),
        (16, "fsdp2", 2, None),  # `auto` fits any world
        (16, {"name": "fsdp2", "replicate": 4, "shard": 4}, 4, {"name": "fsdp2", "replicate": 2, "shard": 2}),
        (128, {"name": "hybrid", "shard": 16, "tensor": 8}, 4, {"name": "hybrid", "shard": 2, "tensor": 2}),
        (16, {"name": "hybrid", "tensor": 8}, 4, {"name": "hybrid", "tensor": 2}),
    ],
)
def test_each_dimension_above_one_is_two(devices: int, strategy: Any, ranks: int, changed: Any) -> None:
    layout = small(devices=devices, strategy=strategy)
    assert layout.ranks == ranks
    assert layout.settings["trainer.devices"] == ranks
    assert layout.settings.get("trainer.strategy") == changed
    assert bool(layout.remarks) == (ranks != devices)


@pytest.mark.parametrize(
    ("devices", "strategy", "ranks"),
    [
        (4, "ddp", [4]),
        (3, "fsdp2", [3]),
        (4, {"name": "hybrid", "shard": 1, "tensor": 4}, [4]),
        (64, "ddp", [2, 3]),
        (16, "fsdp2", [2, 3]),
        (128, {"name": "hybrid", "shard": 16, "tensor": 8}, [4, 6]),
        (8, {"name": "hybrid", "shard": 1, "tensor": 8}, [2]),  # what three ranks divide two need not
    ],
)
def test_a_few_ranks_are_tried_as_they_are_and_more_in_two_sizes(devices: int, strategy: Any, ranks: list[int]) -> None:
    """A hook that divides by two is right on two ranks, and a plan for two heads does not run on four."""
    assert [layout.ranks for layout in sizes(devices=devices, strategy=strategy)] == ranks


def test_a_pipeline_keeps_its_stages_and_the_rest() -> None:
    sizes = {"pipeline": 4, "replicate": 2, "shard": 4, "tensor": 4}
    layout = small(devices=128, strategy={"name": "hybrid", **sizes})
    assert layout.ranks == 16
    said = "scaled down from 128 ranks (pipeline 4 -> 2, shard 4 -> 2, tensor 4 -> 2); --full verifies all of them"
    assert layout.remarks == (said,)


def test_the_full_layout_is_as_it_is() -> None:
    layout = small(full=True, devices=8, strategy={"name": "fsdp2", "shard": 8})
    assert (layout.ranks, layout.remarks) == (8, ())
    assert "trainer.strategy" not in layout.settings


def test_what_is_not_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing is split"):
        small(devices=1)


def test_a_low_precision_is_verified_in_full_and_said() -> None:
    layout = small(devices=2, strategy="ddp", precision="bf16-mixed")
    assert layout.settings["trainer.precision"] == "32-true"
    assert "not in bf16-mixed" in layout.remarks[0]


def verdict(**changes: Any) -> dict[str, Any]:
    worst = {"count": 8, "red": 0, "name": "head.weight", "relative": 2e-7, "ratio": 1.5}
    return {
        "ok": True,
        "job": "job.yaml",
        "strategy": "hybrid",
        "scaled": ["scaled down"],
        "layout": {"ranks": 4, "replicas": 2, "mesh": {"shard": 2, "tensor": 2}, "expert": 1},
        "steps": 3,
        "noise": {"repeats": 4, "multiple": 10},
        "first": None,
        "red": [],
        "causes": [],
        "wrong": [],
        "compared": {"gradients": worst},
        "alive": {"gradient_norm": 1.0, "losses": [2.0, 1.0], "moved": 8, "still": []},
        "remarks": [],
        "ranks": [2, 4],
        "not_compared": ["later steps than 3", "dropout (set to 0)"],
        **changes,
    }


def test_the_page_says_where_it_differs() -> None:
    first = {
        "what": "gradient",
        "name": "head.weight",
        "rank": 0,
        "relative": 1.0,
        "ratio": None,
        "held": "Shard(dim=0) over shard",
    }
    lines = list(page(verdict(ok=False, first=first, red=["head.weight"], causes=["summed"], wrong=["dead"])))
    assert lines[0] == "layout   hybrid on 4 ranks: shard 2 x tensor 2"
    assert "DIFFERENT: gradient head.weight is the first of 1 that differ" in lines
    assert lines[-4:] == [
        "by       1 of its size, inf x the noise",
        "held     Shard(dim=0) over shard",
        "wrong    dead",
        "cause    summed",
    ]


def test_the_page_of_what_is_not_alive() -> None:
    lines = list(page(verdict(ok=False, wrong=[f"wrong {i}" for i in range(9)])))
    assert "WRONG: wrong 0" in lines
    assert lines[-1].strip() == "and 2 more (--json)"


def test_the_last_line_says_what_was_not_compared() -> None:
    assert list(page(verdict()))[-1] == (
        "equal: the model, split like this, is still the model, on 2 and 4 ranks in 3 steps; "
        "not compared: later steps than 3, dropout (set to 0)"
    )


def test_the_parent_imports_no_torch(tmp_path: Path) -> None:
    """It starts processes that do."""
    code = "import sys, fairlead_lightning.verify.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0

"""Memory that ran out: which errors say so, and what is said where no plan can be made."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlead import TrainerConfig
from fairlead.jobs import load_job
from fairlead.plugin_classes import CommandPlugin
from fairlead.plugins import PluginManager, default_plugins
from fairlead.resolve import resolve
from fairlead_lightning.lifecycle.out_of_memory import ran_out_of_memory, what_helps

broken = CommandPlugin("broken", "fails", arguments="x:y", runtime="x:y", out_of_memory=f"{__name__}:fails")


def fails(*_: Any) -> Any:
    raise ValueError("the model cannot be built again")


def led_to(error: BaseException, other: BaseException) -> BaseException:
    other.__cause__ = error
    return other


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True),
        (MemoryError(), True),
        (led_to(torch.OutOfMemoryError("no"), RuntimeError("the step failed")), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_says_that_memory_ran_out(error: BaseException, is_it: bool) -> None:
    assert ran_out_of_memory(error) is is_it


def lines(plugins: PluginManager, folder: Path) -> list[str]:
    (folder / "job.yaml").write_text("model: {class: 'm:M'}\n")
    loaded = load_job("job.yaml", plugins=plugins, cwd=folder, environ={})
    return list(what_helps(loaded, resolve(TrainerConfig(), environ={}, plugins=default_plugins()), plugins))


def test_without_the_plan_it_says_how_to_get_it(tmp_path: Path) -> None:
    first, second = lines(PluginManager(entry_points=[]), tmp_path)
    assert "a smaller batch on each rank, activation checkpointing or sharding (fsdp2) helps" in first
    assert "`fairlead plan` says for this job: pip install" in second
    assert "[plan]" in second


def test_a_plan_that_fails_does_not_hide_the_error(tmp_path: Path) -> None:
    plugins = PluginManager(entry_points=[EntryPoint("command.broken", f"{__name__}:broken", "fairlead")])
    assert lines(plugins, tmp_path)[1:] == [
        "`fairlead broken` cannot say by how much: ValueError: the model cannot be built again"
    ]

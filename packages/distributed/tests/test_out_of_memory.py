"""Memory that ran out: which errors say so, and what their tracebacks say besides."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fairlead_distributed.run.failure_watch import NOTE, note_out_of_memory

LOOP = """
import torch

from fairlead import Run

torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
with Run("run", model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), max_steps=2) as run:
    run.restore()
    torch.empty(1 << 55)
"""


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
    assert note_out_of_memory(error) is is_it
    note_out_of_memory(error)
    assert getattr(error, "__notes__", []) == [NOTE] * is_it, "once, whoever looks at it"


def test_the_traceback_of_a_custom_loop_says_what_helps(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    done = subprocess.run([sys.executable, "loop.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "can't allocate memory" in done.stderr
    assert done.stderr.rstrip().endswith(NOTE)


def test_errors_in_a_circle_end() -> None:
    """One that is kept and raised again, while it is handled, is the context of its own context."""
    first, second = ValueError("replaced"), RuntimeError("while it ended")
    first.__cause__, second.__context__ = second, first
    assert not note_out_of_memory(first)

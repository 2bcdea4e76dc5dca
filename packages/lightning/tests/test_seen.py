"""What a script's own Trainer has decided is seen."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from tiny_job import plain

from fairlead.exactness import verdict
from fairlead_lightning.resume.seen import script_reasons


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_steps": 3}, "exact"),
        ({"max_steps": 3, "val_check_interval": timedelta(minutes=1)}, "not exact"),
        ({"max_time": timedelta(minutes=1)}, "not exact"),
        ({"max_steps": 3, "reload_dataloaders_every_n_epochs": 2}, "not exact"),
        ({"max_steps": 3, "overfit_batches": 2}, "not known"),
    ],
)
def test_a_scripts_settings(options: dict[str, Any], expected: str) -> None:
    """What no two runs do alike is not called exact (issue 3)."""
    assert verdict(script_reasons(plain(**options), seeded=True, in_order=True)) == expected


def test_a_script_without_a_seed() -> None:
    (reason,) = script_reasons(plain(max_steps=3), seeded=False, in_order=True)
    assert "seed_everything" in reason.fix

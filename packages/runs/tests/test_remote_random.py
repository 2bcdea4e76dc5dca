"""The global generator is the training's: nothing that waits for a store draws from it."""

from __future__ import annotations

import random
import sys
import types

import pytest

from fairlead_runs.remote import Store


def test_tries_of_a_request_draw_from_a_generator_of_their_own() -> None:
    pytest.importorskip("s3fs")
    from botocore import retryhandler  # type: ignore[import-untyped]

    Store.open("s3://bucket/prefix", {"anon": True})
    before = random.getstate()
    retryhandler.delay_exponential("rand", 2, 3)
    assert random.getstate() == before


def test_so_do_those_of_google(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gcsfs has it, which is not installed here: `random.random()` in a module of this name."""
    module = types.ModuleType("gcsfs.retry")
    exec("import random\ndef pause():\n    return random.random()", vars(module))
    monkeypatch.setitem(sys.modules, "gcsfs.retry", module)
    Store.open("memory://bucket")
    before = random.getstate()
    module.pause()
    assert random.getstate() == before

"""The global generator is the training's: nothing that waits for a store draws from it."""

from __future__ import annotations

import random

import pytest

from fairlead_runs.remote import Store


def test_tries_of_a_request_draw_from_a_generator_of_their_own() -> None:
    pytest.importorskip("s3fs")
    from botocore import retryhandler  # type: ignore[import-untyped]

    Store.open("s3://bucket/prefix", {"anon": True})
    before = random.getstate()
    retryhandler.delay_exponential("rand", 2, 3)
    assert random.getstate() == before

"""Forked ranks, and one undisturbed run of each case, for all tests here."""

from __future__ import annotations

import pytest

from integration_tests.exact.cases import Starter, warm
from integration_tests.exact.references import References


@pytest.fixture(scope="session")
def warm_starter() -> Starter:
    return warm


@pytest.fixture(scope="session")
def references(warm_starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("undisturbed"), warm_starter)

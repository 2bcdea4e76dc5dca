"""Where transformers is not installed, the error says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

from fairlead.errors import MissingDependencyError


def test_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "fairlead_huggingface.callback", raising=False)
    package = importlib.import_module("fairlead_huggingface")
    with pytest.raises(MissingDependencyError, match=r"needs transformers") as refused:
        _ = package.Fairlead
    assert "huggingface" in str(refused.value)

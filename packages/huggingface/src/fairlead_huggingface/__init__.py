"""Hugging Face's Trainer in a Fairlead run: `Trainer(..., callbacks=[Fairlead("runs/x")])`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairlead_huggingface.callback import Fairlead as Fairlead

__all__ = ["Fairlead"]


def __getattr__(name: str) -> Any:
    """Imports the callback on its first use: transformers takes seconds."""
    if name != "Fairlead":
        raise AttributeError(f"module 'fairlead_huggingface' has no attribute {name!r}")
    try:
        from fairlead_huggingface.callback import Fairlead
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("transformers", "accelerate"):
            raise
        from fairlead.errors import MissingDependencyError
        from fairlead.install import install_line

        raise MissingDependencyError(
            f"fairlead_huggingface.Fairlead needs {error.name}", fix=install_line("huggingface")
        ) from error
    return Fairlead

"""Whether a resumed run ends with the same bits as an undisturbed one: exact, not exact, or not known; torch-free.

`device_reasons` reads the settings, `source_reasons` the user's sources.  A start that has seen the loaders says what
it saw (`record`), and its word takes the place of the sources.  What is not exact is never called exact: what cannot be
told is *not known*.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fairlead.exactness.reasons import Verdict, sentence, verdict

if TYPE_CHECKING:
    from fairlead.exactness.recorded import EXACTNESS_FILE as EXACTNESS_FILE
    from fairlead.exactness.recorded import Recorded as Recorded
    from fairlead.exactness.recorded import last_record as last_record
    from fairlead.exactness.recorded import record as record
    from fairlead.exactness.settings import device_reasons as device_reasons
    from fairlead.exactness.sources import Reading as Reading
    from fairlead.exactness.sources import source_reasons as source_reasons

__all__ = [
    "EXACTNESS_FILE",
    "Reading",
    "Recorded",
    "Verdict",
    "device_reasons",
    "last_record",
    "record",
    "sentence",
    "source_reasons",
    "verdict",
]

_HOMES: Final = {
    "EXACTNESS_FILE": "recorded",
    "Reading": "sources",
    "Recorded": "recorded",
    "device_reasons": "settings",
    "last_record": "recorded",
    "record": "recorded",
    "source_reasons": "sources",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on its first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fairlead.exactness' has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(f"fairlead.exactness.{_HOMES[name]}"), name)
    return value

"""Callbacks that cost a step nothing."""

from __future__ import annotations

from typing import TypeVar

import lightning.pytorch as L

_Callback = TypeVar("_Callback", bound=L.Callback)


def only_its_own_batch_hooks(callback: type[_Callback]) -> type[_Callback]:
    """A class decorator: the hooks of every batch that the callback does not define are not there at all.

    Lightning opens a profiler's block for each hook of each callback, some microseconds; what is no call is left out.
    """
    for name in vars(L.Callback):
        of_each = name.endswith(("_batch_start", "_batch_end")) or name.startswith(("on_before_", "on_after_backward"))
        if of_each and getattr(callback, name) is getattr(L.Callback, name):
            setattr(callback, name, None)
    return callback

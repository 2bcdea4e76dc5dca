"""What `fairlead` imports sooner or later, also when it trains: a fork server imports this module, once.

Where one cannot be imported, those before it serve all the same.
"""
# ruff: noqa: I001, E402 - in the order in which they are to be had

import fairlead_lightning.commands.preload  # noqa: F401
from fairlead.plugins import PluginManager

PluginManager().records(load=True)  # whatever a test's job selects

import torch.utils.tensorboard  # noqa: F401
import matplotlib.figure  # noqa: F401 - examples/gpt
import s3fs  # type: ignore[import-untyped]  # noqa: F401 - Lightning asks it whether a folder is in an object store

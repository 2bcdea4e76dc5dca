"""The logger `mlflow`: a run at an MLflow server, or in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from fairlead import LoggerConfigBase, LoggerPlugin
from fairlead.engines import LIGHTNING


class MLflowLoggerConfig(LoggerConfigBase):
    """A run in MLflow: at a server, in a database, or in `mlruns/` of the run directory.

    All starts of a run are one run there: its id is in `mlflow-run.json` of the run directory. What MLflow has of a
    step is not logged once more when the step is retrained.

    Example:
        >>> MLflowLoggerConfig(tracking_uri="http://mlflow:5000", experiment="gpt").experiment
        'gpt'
    """

    name: Literal["mlflow"] = "mlflow"
    tracking_uri: str | None = None
    """The server or database; None: MLFLOW_TRACKING_URI, else files in `mlruns/` of the run directory."""
    experiment: str | None = None
    """The experiment, which is made where there is none; None: MLFLOW_EXPERIMENT_NAME, else Lightning's
    `lightning_logs`."""
    run_name: str | None = None
    """How the run is called there; None: the name of the run directory."""
    tags: Mapping[str, str] = Field(default_factory=dict)
    """Tags of the run."""
    prefix: str = ""
    """Put before the name of each metric, with a dash."""


class MLflow(LoggerPlugin):
    """Metrics in MLflow."""

    config = MLflowLoggerConfig
    runtime = "fairlead_lightning.loggers.mlflow_runtime:build"
    engines = (*LIGHTNING, "mlflow-skinny")
    extra = "mlflow"


mlflow = MLflow()

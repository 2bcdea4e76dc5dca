"""The check of every job that looks at its run directory."""

from __future__ import annotations

from fairlead.plugin_classes import CheckPlugin

run_directory = CheckPlugin("fairlead_runs.run_check:check_run_directory", reads_run=True)

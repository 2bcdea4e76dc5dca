"""The core's own checks of every job."""

from __future__ import annotations

from fairlead.plugin_classes import CheckPlugin

user_code = CheckPlugin("fairlead.job_code:check_user_code")

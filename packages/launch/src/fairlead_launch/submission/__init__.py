"""Hands a job to a scheduler: the copy of its code, its job files and its script; never imports torch."""

from __future__ import annotations

from fairlead_launch.submission.interface import JobState, Phase, Request, Submitter

__all__ = ["JobState", "Phase", "Request", "Submitter"]

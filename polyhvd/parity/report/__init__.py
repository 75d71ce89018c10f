"""What ``polyhvd parity`` writes: a value that all reports are made of, and each form in a file."""

from __future__ import annotations

from polyhvd.parity.report.findings import SCHEMA, Check, Report

__all__ = ["SCHEMA", "Check", "Report"]

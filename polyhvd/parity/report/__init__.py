"""The reports of ``polyhvd parity``: one value that all are made of, and a file for each form."""

from __future__ import annotations

from polyhvd.parity.report.findings import SCHEMA, Check, Report

__all__ = ["SCHEMA", "Check", "Report"]

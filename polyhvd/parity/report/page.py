"""The report as one page of HTML."""

from __future__ import annotations

from polyhvd.parity.report.findings import Report

__all__ = ["as_html"]


def as_html(report: Report) -> str:
    """To be written."""
    return report.case

"""The report for programs: JSON with a version, and JUnit's XML as CI servers read it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

from polyhvd.parity.report.findings import SCHEMA, Check, Report

__all__ = ["as_json", "as_junit"]

#: Characters that XML 1.0 cannot hold.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_json(report: Report) -> str:
    """The report as JSON, with numbers that are not finite as texts: "inf", "-inf" and "nan"."""
    return json.dumps(_plain({"schema": SCHEMA, **asdict(report)}), indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def as_junit(report: Report) -> str:
    """The report as JUnit's XML: a test suite with a test case for each check.

    If the case could not be compared, the reason is an error of a separate test case.
    """
    failures = report.differing
    is_error = report.outcome not in ("agree", "differ")
    counts = {
        "tests": str(len(report.checks) + is_error),
        "failures": str(len(failures)),
        "errors": str(int(is_error)),
        "time": f"{report.seconds:.3f}",
    }
    root = ElementTree.Element("testsuites", {"name": "polyhvd parity", **counts})
    suite = ElementTree.SubElement(
        root, "testsuite", {"name": _text(f"parity.{report.case}"), **counts, "skipped": "0"}
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (("steps", report.steps), ("ranks", report.ranks), *report.versions.items()):
        ElementTree.SubElement(properties, "property", {"name": str(name), "value": _text(str(value))})
    for check in report.checks:
        _test_case(suite, report, check)
    if is_error:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": _text(f"parity.{report.case}"), "name": "run", "time": "0"}
        )
        error = ElementTree.SubElement(
            case, "error", {"type": report.outcome, "message": _text(report.message.splitlines()[0])}
        )
        error.text = _text(report.message)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, "unicode") + "\n"


def _test_case(suite: ElementTree.Element, report: Report, check: Check) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        {
            "classname": _text(f"parity.{report.case}.{check.question}"),
            "name": _text(check.name),
            "time": "0",
        },
    )
    if not check.agree:
        failure = ElementTree.SubElement(
            case, "failure", {"type": str(check.first.get("kind", "differ")), "message": _text(check.text)}
        )
        failure.text = _text("\n".join(filter(None, (check.text, str(check.first.get("advice", ""))))))


def _text(text: str) -> str:
    return _NOT_XML.sub("�", text)

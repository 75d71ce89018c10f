"""Hooks of MkDocs and Griffe: lay polyhvd out with its adapters, and translate what Markdown lacks."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[1]
LAID_OUT = ROOT / "build" / "documented"
#: A link from a document to a file of the repository that is not part of the site.
OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(?:#[^)]*)?\)")
#: Of docstrings: ":func:`~module.name`", and the line above an example.
ROLE = re.compile(r":(?:py:)?(?:func|class|meth|mod|attr|data|exc):`~?([^`]+)`")
EXAMPLE = re.compile(r"^( *)(Examples?)::$", re.MULTILINE)


def on_startup(**_: Any) -> None:
    """Make a folder of links, which must be there when mkdocstrings looks for its paths."""
    package = LAID_OUT / "polyhvd"
    shutil.rmtree(LAID_OUT, ignore_errors=True)
    package.mkdir(parents=True)
    adapters = (path.parent for path in (ROOT / "frameworks").glob("*/__init__.py"))
    for path in [*(ROOT / "polyhvd").iterdir(), *adapters]:
        (package / path.name).symlink_to(path)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Show files outside the site by their paths in the repository."""
    folder = ROOT / "docs" / Path(page.file.src_uri).parent

    def shown(match: re.Match[str]) -> str:
        path = (folder / match[2]).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return match[0]
        return f"{match[1]} (`{path.relative_to(ROOT).as_posix()}`)"

    return OUTSIDE.sub(shown, markdown)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Load the substitute for workers of a site in a folder from the site, not from the network."""
    top = "../" * page.file.src_uri.count("/")
    output = output.replace("https://unpkg.com/iframe-worker/shim", f"{top}assets/worker.js")
    if '<script src="http' in output:
        raise ValueError(f"{page.file.src_uri} loads a script from the network")
    return output


class Roles(griffe.Extension):
    """Makes Markdown of Sphinx's roles and examples in docstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object that was read."""
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(r"\1**\2**", text)

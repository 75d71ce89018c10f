"""The pages of documentation that are installed with the package."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

__all__ = ["listing", "page"]


def _pages() -> dict[str, Path]:
    """All pages by topic, in the installed package or in the checkout that holds it.

    Not index.md, which is the home page of the website.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "docs", package.parent / "docs"):
        if found := {path.stem: path for path in [*folder.glob("*.md"), *folder.glob("guides/*.md")]}:
            return {topic: found[topic] for topic in sorted(found) if topic != "index"}
    return {}


def listing() -> list[str]:
    """One line for each topic: its name and title."""
    pages = _pages()
    width = max(map(len, pages), default=0)
    return [f"{topic:{width}}  {_title(path)}" for topic, path in pages.items()]


def _title(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def page(topic: str) -> list[str]:
    """The lines of a page.

    Raises:
        ValueError: there is no page on this topic.
    """
    pages = _pages()
    if topic not in pages:
        nearest = get_close_matches(topic, pages, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "for a list, run: polyhvd docs"
        raise ValueError(f"docs: no topic {topic!r}; {hint}")
    return pages[topic].read_text(encoding="utf-8").splitlines()

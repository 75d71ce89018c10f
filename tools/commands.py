"""Prints docs/commands.md, the options of both commands, from their parsers.

``python tools/commands.py > docs/commands.md``
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from polyhvd import cli
from polyhvd.launch.cli import options
from polyhvd.parity import migrating

_HEAD = """\
# Commands

The options of `polyhvdrun`, which starts jobs, and of `polyhvd`, which inspects and measures them. `--help`
prints them as well. `python tools/commands.py` generates this page.
"""


def name_of(action: argparse.Action) -> str:
    """An option with its value, or the name of an argument."""
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if isinstance(value, tuple):
        value = " ".join(value)
    if not action.option_strings:
        return f"`{value}`"
    value = "" if action.nargs == 0 else f" {value}"
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def rows(parser: argparse.ArgumentParser, actions: list[argparse.Action]) -> Iterator[str]:
    """The table of options that have a help text."""
    formatter = parser._get_formatter()
    hidden = (None, "", argparse.SUPPRESS)
    shown = [each for each in actions if each.help not in hidden and each.dest not in ("help", "command")]
    if shown:
        yield from ("", "| option | meaning |", "|---|---|")
    for action in shown:
        text = " ".join(formatter._expand_help(action).split())
        yield "| {} | {} |".format(*(cell.replace("|", "\\|") for cell in (name_of(action), text)))


def commands(parser: argparse.ArgumentParser, name: str, help: str = "") -> Iterator[str]:
    """The section of a command and of its subcommands."""
    yield from ("", f"## {name}")
    if text := parser.description or (help and f"{help[0].upper()}{help[1:]}."):
        yield from ("", " ".join(text.split()))
    usual, *others = parser._action_groups[1:]
    yield from rows(parser, [*parser._action_groups[0]._group_actions, *usual._group_actions])
    for group in others:
        if found := [*rows(parser, group._group_actions)]:
            yield from ("", f"### {name}: {group.title}", *found)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                yield from commands(action.choices[choice.dest], f"{name} {choice.dest}", choice.help or "")


def main() -> None:
    """Print the page."""
    os.environ["COLUMNS"] = "100"
    print(_HEAD, end="")
    parsers = {
        "polyhvdrun": options.make_parser(),
        "polyhvd": cli._parser(with_parity=True),
        "polyhvd parity migrate": migrating._parser(),
    }
    for name, parser in parsers.items():
        print("\n".join(commands(parser, name)))


if __name__ == "__main__":
    main()

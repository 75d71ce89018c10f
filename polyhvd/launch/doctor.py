"""What polyhvd finds on this host, and which launcher's job ``init()`` would join here."""

from __future__ import annotations

import os

from polyhvd.config import ConfigError
from polyhvd.launch.providers import PROVIDERS
from polyhvd.launch.providers.choice import explain, seen

__all__ = ["doctor", "report"]


def report() -> list[str]:
    """What was found, as lines of text."""
    from polyhvd.observe import doctor as host  # which takes a while to import

    try:
        lines = explain(seen(PROVIDERS, os.environ))
    except ConfigError as error:
        lines = [str(error)]
    return [*host.report(), "", "Launcher:", *(f"  {line}" for line in lines)]


def doctor() -> None:
    """Print what was found on this host, and for what is missing why, and what to do.

    Raises:
        ConfigError: an environment variable cannot be used.

    Example::

        import polyhvd
        polyhvd.doctor()
    """
    print("\n".join(report()))

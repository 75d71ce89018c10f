"""Resolves a host name in the background, so that the caller can continue while name servers do not answer.

``getaddrinfo`` cannot be interrupted, and takes up to 40 s where name servers do not answer.
"""

from __future__ import annotations

import queue
import threading
from contextlib import suppress

from polyhvd.rendezvous import network

__all__ = ["Lookup"]


class Lookup:
    """Looks the same name up again and again, since hosts of a job may get theirs late, or move.

    Args:
        host: a name or an address.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._asked = False
        self._answers: queue.SimpleQueue[list[str] | OSError] = queue.SimpleQueue()  # all that threads share
        self._found: list[str] = []
        #: Why the name has no address, as far as is known; empty: it has one.
        self.problem = "no name server has answered yet"

    def look(self, wait_s: float) -> list[str]:
        """The addresses as they are known by now; empty if they are not.

        Args:
            wait_s: how long a new answer may be waited for.
        """
        if not self._asked:
            self._asked = True
            threading.Thread(target=self._ask, name="polyhvd-lookup", daemon=True).start()
        with suppress(queue.Empty):
            answer = self._answers.get(timeout=wait_s)
            self._asked = False
            if isinstance(answer, OSError):
                self._found, self.problem = [], answer.strerror or str(answer)
            else:
                self._found, self.problem = answer, ""
        return self._found

    def _ask(self) -> None:
        try:
            self._answers.put(network.resolve(self._host))
        except OSError as error:
            self._answers.put(error)
        except UnicodeError:
            self._answers.put(OSError("it cannot be a host's name"))

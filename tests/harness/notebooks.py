"""A real kernel of Jupyter, for tests in an environment that has it."""

from __future__ import annotations

import time
from typing import Any

from jupyter_client import manager
from ranks_alive import DEADLINE_S

__all__ = ["Notebook"]


class Notebook:
    """Runs cells, and can interrupt one when it has printed something."""

    def __init__(self) -> None:
        self.kernel, self._client = manager.start_new_kernel(kernel_name="python3")

    def run(self, cell: str, *, interrupt_at: str = "") -> tuple[str, Any]:
        """Returns what the cell has printed, and its result or the name of its error."""
        request = self._client.execute(cell)
        printed, result = "", None
        deadline = time.monotonic() + DEADLINE_S
        while True:
            message = self._client.get_iopub_msg(timeout=deadline - time.monotonic())
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != request:
                continue
            if kind == "stream" and content["name"] == "stdout":
                printed += content["text"]
                if interrupt_at and interrupt_at in printed:
                    interrupt_at = ""
                    self.kernel.interrupt_kernel()
            elif kind == "error":
                result = content["ename"]
            elif kind == "execute_result":
                result = content["data"]["text/plain"]
            elif kind == "status" and content["execution_state"] == "idle":
                return printed, result

"""Called by mpirun in place of ssh: runs a command in the namespace that plays a host.

``python -m benchmarks.netns_agent ADDRESS COMMAND...``; the environment names the namespaces.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    address, *command = sys.argv[1:]
    namespace = json.loads(os.environ["BENCH_NAMESPACES"])[address]
    os.execvp("ip", ["ip", "netns", "exec", namespace, "sh", "-c", " ".join(command)])


if __name__ == "__main__":
    main()

"""Runs the scripts of checks that the command line names, in one process: ``several_scripts.py ranks_ops``.

The engine ends between them, so that each begins as it would alone.
"""

from __future__ import annotations

import importlib
import sys

import spmd

import polyhvd

if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)  # all first: TensorFlow takes settings of threads before its first use
    for name in sys.argv[1:]:
        spmd.run_checks(name)
        if polyhvd.is_initialized():
            polyhvd.barrier()  # rank 0 coordinates the others: it is not to leave before them
            polyhvd.shutdown()
        print(f"ENDED {name}", flush=True)

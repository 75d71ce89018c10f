"""Which Lightning it is: the package has two names, whose classes are not each other's."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

__all__ = ["cluster_environment", "fabric", "layer_sync", "pl", "rank_zero"]


def _name() -> str:
    """The one that the program has imported; ``lightning`` brings the other one along."""
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        return "pytorch_lightning"
    return "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"


pl: Any = importlib.import_module(_name())
layer_sync: Any = importlib.import_module(f"{pl.__name__}.plugins.layer_sync")
rank_zero: Any = importlib.import_module(f"{pl.__name__}.utilities.rank_zero")
cluster_environment: Any = importlib.import_module(f"{pl.__name__}.strategies.parallel").ClusterEnvironment
fabric: Any = importlib.import_module(
    "lightning_fabric" if pl.__name__ == "pytorch_lightning" else "lightning.fabric"
)
importlib.import_module(f"{fabric.__name__}.strategies")

"""One model in several frameworks: jobs in which they train together, and proof that they agree.

Imports no framework: the model or tensor it is given determines which one is needed.

Example::

    from polyhvd import parity
    mapping = parity.mapping(net)  # on every rank, of that rank's model
    mapping.broadcast(root_rank=0)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, mapping=mapping)
"""

from __future__ import annotations

from polyhvd.parity.comparing import Comparison, Difference, ParityError, compare
from polyhvd.parity.fingerprints import Fingerprint, Tolerance, tolerance_of
from polyhvd.parity.loading import Loaded, load
from polyhvd.parity.models import mapping
from polyhvd.parity.watching import Divergence, Watch, watch
from polyhvd.training.layouts import Layout
from polyhvd.training.mapping import Weight, WeightMapping

__all__ = [
    "Comparison",
    "Difference",
    "Divergence",
    "Fingerprint",
    "Layout",
    "Loaded",
    "ParityError",
    "Tolerance",
    "Watch",
    "Weight",
    "WeightMapping",
    "compare",
    "load",
    "mapping",
    "tolerance_of",
    "watch",
]

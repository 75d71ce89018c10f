"""Jobs whose manager describes a cluster in JSON: TensorFlow's TF_CONFIG, as Hopsworks, Vertex AI and
Kubeflow's TFJob set it, and Vertex AI's CLUSTER_SPEC.

Ranks are numbered as tf.distribute numbers them (tensorflow/python/distribute/multi_worker_util.py,
``id_in_cluster``): the chief, then the workers. An evaluator is not a rank, but a world of one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from polyhvd.config import ConfigError
from polyhvd.launch.providers.meeting import MeetingProvider
from polyhvd.launch.providers.provider import Claim
from polyhvd.rendezvous.network import is_loopback, parse_endpoint

__all__ = ["ClusterProvider"]

#: The kinds of tasks that train, in the order of their ranks; the last two are Vertex AI's.
_RANKS = ("chief", "master", "worker", "workerpool0", "workerpool1")
#: The kinds that look at what the others have saved, each for itself.
_EVALUATORS = ("evaluator", "workerpool3")


class ClusterProvider(MeetingProvider):
    """Ranks described by a variable in JSON.

    TF_CONFIG: https://www.tensorflow.org/guide/distributed_training, "Setting up the TF_CONFIG environment
    variable"; CLUSTER_SPEC: https://cloud.google.com/vertex-ai/docs/training/distributed-training.
    """

    within = frozenset({"SageMaker"})
    secret_hint = "in the environment of every task"

    def __init__(self, variable: str) -> None:
        self.name = variable

    def detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Which of the chief and the workers this process is; None where no cluster is described."""
        text = environ.get(self.name, "")
        if not text.strip():
            return None
        try:
            described = json.loads(text)
            cluster = {kind: _hosts(listed) for kind, listed in described.get("cluster", {}).items()}
            task = described.get("task") or {}
            kind, number = str(task.get("type", "")), task.get("index")
            index = None if number is None else int(number)
        except (AttributeError, TypeError, ValueError, OverflowError, RecursionError):
            raise ConfigError(
                f"{self.name} is not a description of a cluster in JSON: {text[:200]!r}"
            ) from None
        ranks = [(kind, number) for kind in _RANKS for number in range(len(cluster.get(kind, ())))]
        if not ranks and kind not in _RANKS:
            return None
        counts = ", ".join(f"{len(hosts)} of {kind}" for kind, hosts in cluster.items())
        if index is None and len(cluster.get(kind, ())) == 1:
            index = 0
        seen = f"{self.name}: task {kind or '?'} {'?' if index is None else index} of {counts}"
        if kind in _EVALUATORS or (len(ranks) == 1 and not kind):
            return Claim(0, 1, seen=seen)
        if (kind, index) not in ranks:
            raise ConfigError(f"init(): this process is not a rank of its cluster ({seen})")
        assert index is not None
        hosts = [host for name in _RANKS for host in cluster.get(name, ())]
        if twice := next((host for host in hosts if hosts.count(host) > 1), ""):
            raise ConfigError(
                f"init(): {self.name} names {twice} twice, of which each rank needs one ({seen})"
            )
        return Claim(
            ranks.index((kind, index)),
            len(ranks),
            job_id=f"cluster {hashlib.sha256(json.dumps(hosts).encode()).hexdigest()}",
            seen=seen,
            one_host=all(map(is_loopback, map(_name, hosts))),
            root=_name(hosts[0]),
        )


def _hosts(listed: Any) -> list[str]:
    """The hosts of a kind: a list, or a mapping from numbers."""
    if isinstance(listed, dict):
        return [str(listed[number]) for number in sorted(listed, key=int)]
    if not isinstance(listed, list):
        raise TypeError
    return [str(host) for host in listed]


def _name(host: str) -> str:
    """Without its port."""
    try:
        return parse_endpoint(host)[0]
    except ValueError:
        return host

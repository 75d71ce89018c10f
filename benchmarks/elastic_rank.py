"""A rank of an elastic job that is measured: it trains, is killed at times, and notes when what happened.

``python -m benchmarks.elastic_rank FRAMEWORK MB kill|leave NUMBER FOLDER``. Times are those of the
machine's monotonic clock, in FOLDER/events, one JSON line each: a process is "ready" for a place, "step"
begins, "kill", "notice" is given, "error" reaches the training function, "interrupt" does, a rank has "left".

Model and state are made before ``init()``, as docs/elastic.md advises: a spare has done that when it waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.workloads import MB, resnet50_elements

COMMIT_EVERY = 10
#: From the last change of the world to the next kill, and from the moment when a spare is there.
QUIET_S = 2.0
LEAVE_AFTER_S = 1.0


class Events:
    """Lines of one file that all ranks append to."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events"
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, event: str, **what: Any) -> None:
        """Note when something happens: now."""
        line = json.dumps({"at": time.monotonic(), "event": event, "pid": os.getpid(), **what})
        os.write(self._file, line.encode() + b"\n")

    def living(self) -> int:
        """How many processes have been ready for a place and were not killed."""
        text = self._path.read_text()
        return text.count('"event": "ready"') - text.count('"event": "kill"')


@contextlib.contextmanager
def noted(events: Events, hvd: Any) -> Iterator[None]:
    """Note when an interrupt or error reaches what is within."""
    try:
        yield
    except hvd.elastic.HostsUpdatedInterrupt:
        events.note("interrupt")
        raise
    except Exception as error:
        events.note("error", of=type(error).__name__)
        raise


def elements(megabytes: int) -> list[int]:
    """Sizes of parameters: ResNet-50's, in all as large as asked for."""
    whole = resnet50_elements()
    return [max(1, size * megabytes * MB // (4 * sum(whole))) for size in whole]


def beginning() -> float:
    """The first weights of a process: different from those of the others, as a new process's are."""
    return 1 / os.getpid()


# Each returns hvd, the state, and what a step does with the gradient of one small layer.


def numpy_job(
    sizes: list[int], ready: Callable[[], None] = lambda: None
) -> tuple[Any, Any, Callable[[], Any]]:
    import numpy as np
    import polyhvd.numpy as hvd

    state = hvd.elastic.ArrayState(
        weights=[np.full(size, beginning(), np.float32) for size in sizes], step=0, kills=0
    )
    ready()
    hvd.init()
    gradient = np.ones(1024, np.float32)
    return hvd, state, lambda: hvd.allreduce(gradient, name="gradient")


def torch_job(
    sizes: list[int], ready: Callable[[], None] = lambda: None
) -> tuple[Any, Any, Callable[[], Any]]:
    import polyhvd.torch as hvd
    import torch

    torch.set_num_threads(1)
    model = torch.nn.ParameterList([torch.full((size,), beginning()) for size in sizes])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, kills=0)
    ready()
    hvd.init()
    gradient = torch.ones(1024)
    return hvd, state, lambda: hvd.allreduce(gradient, name="gradient")


def tensorflow_job(
    sizes: list[int], ready: Callable[[], None] = lambda: None
) -> tuple[Any, Any, Callable[[], Any]]:
    import polyhvd.tensorflow as hvd
    import tensorflow as tf

    variables = [
        tf.Variable(tf.fill([size], beginning()), name=f"v{number}") for number, size in enumerate(sizes)
    ]
    state = hvd.elastic.TensorFlowState(variables, step=0, kills=0)
    ready()
    hvd.init()
    gradient = tf.ones([1024])
    return hvd, state, lambda: hvd.allreduce(gradient, name="gradient")


def mxnet_job(
    sizes: list[int], ready: Callable[[], None] = lambda: None
) -> tuple[Any, Any, Callable[[], Any]]:
    import polyhvd.mxnet as hvd  # isort: skip
    import mxnet as mx
    from mxnet import gluon

    class Net(gluon.Block):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            with self.name_scope():
                for number, size in enumerate(sizes):
                    setattr(self, f"p{number}", self.params.get(f"p{number}", shape=(size,)))

    net = Net()
    net.initialize(mx.init.Constant(beginning()))
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    state = hvd.elastic.GluonState(net, trainer, step=0, kills=0)
    ready()
    hvd.init()
    gradient = mx.nd.ones(1024)
    return hvd, state, lambda: hvd.allreduce(gradient, name="gradient").wait_to_read()


JOBS = {"numpy": numpy_job, "torch": torch_job, "tensorflow": tensorflow_job, "mxnet": mxnet_job}


def commits(rounds: int) -> None:
    """Print what commits of ResNet-50 with momentum, 205 MB, take, and copies of as many bytes: JSON."""
    import numpy as np
    import polyhvd.torch as hvd
    import torch

    torch.set_num_threads(1)
    model = torch.nn.ParameterList([torch.full((size,), 0.5) for size in resnet50_elements()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    os.environ["POLYHVD_ALONE"] = "1"
    hvd.init()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    source = np.full(2 * sum(resnet50_elements()), 0.5, np.float32)
    target = np.full_like(source, 0.25)
    times: dict[str, list[float]] = {"commit": [], "copy": []}
    for _ in range(rounds + 2):
        for name, act in (("commit", state.commit), ("copy", lambda: np.copyto(target, source))):
            began = time.perf_counter()
            act()
            times[name].append(time.perf_counter() - began)
    print(json.dumps({name: found[2:] for name, found in times.items()}))


def main() -> None:
    if sys.argv[1] == "commits":
        commits(int(sys.argv[2]))
        return
    framework, megabytes, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if how == "hold":
        hold(framework, megabytes)
        return
    number, events = int(sys.argv[4]), Events(Path(sys.argv[5]))
    hvd, state, reduce_gradient = JOBS[framework](elements(megabytes), lambda: events.note("ready"))
    strike = {"kill": kill, "leave": leave}[how](hvd, events, number)

    @hvd.elastic.run
    def train(state: Any) -> None:
        began = time.monotonic()
        size = hvd.size()
        while state.kills < number or time.monotonic() < began + QUIET_S:
            events.note("step", step=state.step, rank=hvd.rank(), size=size)
            with noted(events, hvd):
                reduce_gradient()
                time.sleep(0.002)  # what a model would compute
                state.step += 1
                if state.step % COMMIT_EVERY == 0:
                    began = strike(state, began)
                else:
                    state.check_host_updates()

    train(state)
    events.note("end")
    hvd.shutdown()


def hold(framework: str, megabytes: int) -> None:
    """Have as much memory as a rank with two commits, for whoever kills this process."""
    _, state, _ = JOBS[framework](elements(megabytes))
    state.commit()
    state.commit()
    print("holds", flush=True)
    signal.pause()


def kill(hvd: Any, events: Events, number: int) -> Callable[[Any, float], float]:
    """Commits, and kills a rank of a whole world when the spare has been there for a while."""
    size, spares = (int(os.environ[f"BENCH_ELASTIC_{name}"]) for name in ("SIZE", "SPARES"))
    there_since: float | None = None

    def strike(state: Any, began: float) -> float:
        nonlocal there_since
        is_there = hvd.size() == size and events.living() >= size + spares
        there_since = (there_since or time.monotonic()) if is_there else None
        quiet_since = max(began, there_since or time.monotonic())
        due = least_of(time.monotonic() - quiet_since) > QUIET_S
        if not due or state.kills == number or hvd.size() != size:
            state.commit()
            return began
        state.kills += 1
        victim = random.Random(state.kills).randrange(size)
        state.commit()
        if hvd.rank() == victim:
            events.note("kill")
            os.kill(os.getpid(), signal.SIGKILL)
        there_since = None
        return time.monotonic()  # no rank leaves before this kill has been handled

    return strike


def leave(hvd: Any, events: Events, number: int) -> Callable[[Any, float], float]:
    """Commits, and gives a rank notice, as often as it is asked to."""
    hvd.elastic.on_leave(lambda _: events.note("left"))

    def strike(state: Any, began: float) -> float:
        due = least_of(time.monotonic() - began) > LEAVE_AFTER_S and state.kills < number
        state.kills += due
        state.commit()
        if due and hvd.rank() == random.Random(state.kills).randrange(hvd.size()):
            events.note("notice")
            os.kill(os.getpid(), signal.SIGTERM)
        return time.monotonic() if due else began

    return strike


def least_of(seconds: float) -> float:
    """Return the smallest value of all ranks, on each of them."""
    from polyhvd.collectives.objects import allgather_object

    return min(allgather_object(seconds, name="elapsed"))


if __name__ == "__main__":
    main()

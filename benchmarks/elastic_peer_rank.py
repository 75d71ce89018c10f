"""A rank of another's elastic job that is measured: as :mod:`benchmarks.elastic_hosts_rank`, by its means.

``python -m benchmarks.elastic_peer_rank PEER MB FOLDER``. For torchrun and Ray Train rank 0 keeps the model
in FOLDER, which is to be in memory, and all restarted ranks read it there; Horovod keeps a state.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.elastic_rank import COMMIT_EVERY, Events, elements


def model_of(megabytes: int) -> tuple[Any, Any]:
    """A model of so many megabytes in 161 tensors, and its optimizer."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.ParameterList([torch.full((size,), 0.5) for size in elements(megabytes)])
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(megabytes: int, folder: Path) -> None:
    """In an existing process group of PyTorch: resume from the last checkpoint, and train until the end."""
    import torch
    import torch.distributed as dist

    events, kept = Events(folder), folder / "checkpoint.pt"
    model, optimizer = model_of(megabytes)
    step = 0
    if kept.exists():
        found = torch.load(kept)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        step = found["step"]
    number = torch.tensor([time.monotonic_ns()])
    dist.broadcast(number, 0)
    where = {"rank": dist.get_rank(), "size": dist.get_world_size(), "world": int(number)}
    gradient = torch.ones(1024)
    while True:
        events.note("step", step=step, **where)
        try:
            dist.all_reduce(gradient)
            time.sleep(0.002)  # what a model would compute
            step += 1
            if step % COMMIT_EVERY:
                continue
            done = torch.tensor([float((folder / "done").exists())])
            dist.all_reduce(done)
        except Exception as error:
            events.note("error", of=type(error).__name__)
            raise
        if done:
            return
        if dist.get_rank() == 0:
            new = kept.with_suffix(".new")
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(states, new)
            new.rename(kept)


def torchrun(megabytes: int, folder: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    train(megabytes, folder)
    dist.destroy_process_group()


def ray_train(megabytes: int, folder: Path) -> None:
    """The program that drives; :func:`train` runs in Ray's workers."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=1 << 28)

    def loop(config: dict[str, Any]) -> None:
        train(config["megabytes"], Path(config["folder"]))

    trainer = TorchTrainer(
        loop,
        train_loop_config={"megabytes": megabytes, "folder": str(folder)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=int(os.environ["BENCH_RANKS"])),
        run_config=RunConfig(storage_path=str(folder), failure_config=FailureConfig(max_failures=-1)),
    )
    trainer.fit()


def horovod(megabytes: int, folder: Path) -> None:
    import horovod.torch as hvd
    import torch
    from horovod.common.exceptions import HostsUpdatedInterrupt

    hvd.init()
    events = Events(folder)
    model, optimizer = model_of(megabytes)
    gradient = torch.ones(1024)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        number = hvd.broadcast_object(time.monotonic_ns(), root_rank=0)
        where = {"rank": hvd.rank(), "size": hvd.size(), "world": number}
        while not state.done:
            events.note("step", step=state.step, **where)
            try:
                hvd.allreduce(gradient, name="gradient")
                time.sleep(0.002)  # what a model would compute
                state.step += 1
                if state.step % COMMIT_EVERY:
                    state.check_host_updates()
                    continue
                done = hvd.allreduce(torch.tensor([float((folder / "done").exists())]), name="done")
                state.done = bool(done)
                state.commit()
            except HostsUpdatedInterrupt:
                events.note("interrupt")
                raise
            except Exception as error:
                events.note("error", of=type(error).__name__)
                raise

    loop(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, done=False))


PEERS: dict[str, Callable[[int, Path], None]] = {
    "torchrun": torchrun,
    "ray": ray_train,
    "horovod": horovod,
}


if __name__ == "__main__":
    PEERS[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))

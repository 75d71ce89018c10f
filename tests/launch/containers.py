"""SageMaker's training containers as processes: each with its own /opt/ml, and an address of its own."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from joining import DEADLINE_S, ROOT, SECRET, environment

__all__ = ["Containers"]

_numbers = itertools.count(2)


class Containers:
    """Some containers of one training job, which run polyhvdrun at the same time."""

    def __init__(self, folder: Path, count: int, **resources: Any) -> None:
        """Make their folders; ``resources`` are added to each resourceconfig.json."""
        net = f"127.{os.getpid() % 199 + 20}.{next(_numbers)}"
        self.hosts = [f"{net}.{number + 2}" for number in range(count)]
        self.bases = [folder / f"ml{number}" for number in range(count)]
        self.processes: list[subprocess.Popen[bytes]] = []
        self._folder = folder
        for host, base in zip(self.hosts, self.bases, strict=True):
            for name in ("input/config", "input/data/training", "model", "output", "code", "checkpoints"):
                (base / name).mkdir(parents=True)
            given = {"current_host": host, "hosts": self.hosts, "network_interface_name": host}
            self.config(base, "resourceconfig.json").write_text(json.dumps({**given, **resources}))

    def config(self, base: Path, name: str) -> Path:
        """A file of SageMaker's."""
        return base / "input/config" / name

    def start(self, source: str, *options: str, only: range | None = None, **variables: str) -> Containers:
        """Run polyhvdrun with a script in all containers, or in ``only`` some."""
        script = self._folder / "train.py"
        script.write_text(source)
        command = [sys.executable, "-m", "polyhvd.launch", "--sagemaker", *options, str(script)]
        for number in only or range(len(self.bases)):
            given = {"SAGEMAKER_BASE_DIR": str(self.bases[number]), "POLYHVD_SECRET": SECRET, **variables}
            given["POLYHVD_FLIGHT_DIR"] = str(self._folder)
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            self.processes.append(
                subprocess.Popen(command, cwd=ROOT, env=environment(**given), **pipes)  # type: ignore[call-overload]
            )
        return self

    def start_alone(self, source: str, **variables: str) -> Containers:
        """Run Python with a script in all containers, as SageMaker does without any distribution."""
        script = self._folder / "train.py"
        script.write_text(source)
        for base in self.bases:
            given = environment(SAGEMAKER_BASE_DIR=str(base), **variables)
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, str(script)],
                    cwd=ROOT,
                    env=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
        return self

    def finish(self) -> list[tuple[int, str, str]]:
        """Exit status, standard output and error of each, after their end."""
        ended = []
        for process in self.processes:
            out, err = process.communicate(timeout=DEADLINE_S)
            ended.append((process.returncode, out.decode(), err.decode()))
        return ended

    def failures(self) -> list[str]:
        """What the containers have to say of their failure."""
        return [(base / "output/failure").read_text() for base in self.bases]

    def wait_for(self, text: bytes, count: int) -> bytes:
        """Read of the first container's output until ``text`` has come ``count`` times."""
        stream = self.processes[0].stdout
        assert stream is not None
        seen = b""
        while seen.count(text) < count:
            data = os.read(stream.fileno(), 65536)
            assert data, seen
            seen += data
        return seen

    def end(self) -> None:
        """Kill what is left."""
        for process in self.processes:
            process.kill()
            process.communicate()

"""The environment of a training container of Amazon SageMaker, and the files that SageMaker reads.

Files below /opt/ml, and variables of its training toolkit where that has set them:
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyhvd.runtime import current

__all__ = [
    "FAILURE_CHARS_MAX",
    "SECRET_HINT",
    "Container",
    "arguments",
    "checkpoint_dir",
    "container",
    "find_container",
    "gpu_count",
    "is_here",
    "model_dir",
    "variables",
    "write_failure",
]

#: SageMaker shows no more of the file.
FAILURE_CHARS_MAX = 1024
#: Where the secret of a job of several containers goes.
SECRET_HINT = 'in the estimator: environment={"POLYHVD_SECRET": secrets.token_hex(32)}'
_CUT = "\n...\n"


@dataclass(frozen=True)
class Container:
    """The hosts of a training job, in the order of their ranks, and which of them this is."""

    hosts: tuple[str, ...]
    current: str
    interface: str  # empty: not given
    job: str  # its name; empty: not given

    @property
    def number(self) -> int:
        """This host's place among the hosts; 0 leads, as in SageMaker's toolkit."""
        return self.hosts.index(self.current)


def _base(environ: Mapping[str, str] | None = None) -> Path:
    return Path((os.environ if environ is None else environ).get("SAGEMAKER_BASE_DIR") or "/opt/ml")


def _resource_config(environ: Mapping[str, str]) -> Path:
    return _base(environ) / "input/config/resourceconfig.json"


def container(environ: Mapping[str, str] | None = None) -> Container:
    """Read input/config/resourceconfig.json; raises ValueError, with the file and what is wrong with it."""
    environ = os.environ if environ is None else environ
    path = _resource_config(environ)
    config = _object(path, f"{path}: {{}}; --sagemaker is for SageMaker's training containers")
    here = config.get("current_host")
    hosts = _checked(config.get("hosts"), here, (f"{path}: 'hosts'", f"{path}: 'current_host'"))
    interface = config.get("network_interface_name") or ""
    if not isinstance(interface, str):
        raise ValueError(f"{path}: 'network_interface_name' must be a name; found {json.dumps(interface)}")
    return Container(hosts, str(here), interface, environ.get("TRAINING_JOB_NAME", ""))


def _checked(hosts: Any, here: Any, names: tuple[str, str]) -> tuple[str, ...]:
    """The hosts of a job in the order of their ranks; raises ValueError where they cannot be those."""
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) and host for host in hosts):
        raise ValueError(f"{names[0]} must be a list of names; found {json.dumps(hosts)}")
    if len(set(hosts)) < len(hosts):
        raise ValueError(f"{names[0]} must name each host once; found {json.dumps(hosts)}")
    if here not in hosts:
        raise ValueError(f"{names[1]} must be one of {sorted(hosts)}; found {json.dumps(here)}")
    return tuple(sorted(hosts))


def find_container(environ: Mapping[str, str]) -> tuple[Container, str] | None:
    """The container that a process with these variables is in, and how that is known; None: it is in none.

    Raises:
        ValueError: SageMaker's variables or its file are there, and cannot be used.
    """
    job = environ.get("TRAINING_JOB_NAME", "")
    if "SM_HOSTS" in environ and "SM_CURRENT_HOST" in environ:
        hosts = _parsed(environ["SM_HOSTS"])
        names = _checked(hosts, environ["SM_CURRENT_HOST"], ("SM_HOSTS", "SM_CURRENT_HOST"))
        return Container(names, environ["SM_CURRENT_HOST"], "", job), "SM_HOSTS"
    path = _resource_config(environ)
    return (container(environ), str(path)) if path.exists() else None


def is_here() -> bool:
    """Return whether this process is in a training container, readable or not."""
    try:
        return find_container(os.environ) is not None
    except ValueError:
        return True


def gpu_count() -> int:
    """How many GPUs this container has: SM_NUM_GPUS, or the devices that are there."""
    text = os.environ.get("SM_NUM_GPUS", "")
    if text.isascii() and text.isdigit():
        return int(text)
    return sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))


def arguments() -> list[str]:
    """The hyperparameters as words of a command line: SM_USER_ARGS, or ``--name value`` of each in the file.

    Raises:
        ValueError: they cannot be read.
    """
    text = os.environ.get("SM_USER_ARGS", "")
    if text:
        words = _parsed(text)
        if not isinstance(words, list):
            raise ValueError(f"SM_USER_ARGS must be a list in JSON; found {text!r}")
        return [str(word) for word in words]
    words = []
    for name, value in sorted(_hyperparameters().items()):
        words += [f"--{name}" if len(name) > 1 else f"-{name}", _word(value)]
    return words


def variables(here: Container) -> dict[str, str]:
    """The toolkit's variables that scripts read and that are not set."""
    base = _base()
    values = {
        "SM_HOSTS": json.dumps(list(here.hosts)),
        "SM_CURRENT_HOST": here.current,
        "SM_NUM_GPUS": str(gpu_count()),
        "SM_MODEL_DIR": str(base / "model"),
        "SM_OUTPUT_DATA_DIR": str(base / "output/data"),
        "SM_HPS": json.dumps(_hyperparameters()),
    }
    data = base / "input/data"
    channels = sorted(path.name for path in data.iterdir() if path.is_dir()) if data.is_dir() else []
    values |= {f"SM_CHANNEL_{name.upper()}": str(data / name) for name in channels}
    if here.interface:
        values["NCCL_SOCKET_IFNAME"] = here.interface
    return {name: value for name, value in values.items() if name not in os.environ}


def code_dir() -> Path:
    """Return the folder in which SageMaker's toolkit stores the user's program."""
    return _base() / "code"


def write_failure(text: str) -> None:
    """Report to SageMaker why the job has failed: the beginning and, if it is too long, the end of ``text``.

    Raises:
        OSError: the file cannot be written.
    """
    if len(text) > FAILURE_CHARS_MAX:
        head, _, rest = text.partition("\n")
        head = head[: FAILURE_CHARS_MAX // 2]
        text = head + _CUT + rest[-(FAILURE_CHARS_MAX - len(head) - len(_CUT)) :]
    folder = _base() / "output"
    if folder.is_dir():  # else this is not a container of SageMaker's
        (folder / "failure").write_text(text, "utf-8", errors="replace")


def model_dir() -> str | None:
    """Return the folder in which this rank saves the model: SageMaker's on rank 0, None on all others.

    SageMaker uploads what the hosts have in that folder as one archive, so only one rank may write there.

    Returns:
        SM_MODEL_DIR, or /opt/ml/model if that is not set; None on a rank other than 0.

    Raises:
        NotInitializedError: ``init()`` has not been called.

    Example::

        if folder := polyhvd.sagemaker.model_dir():
            torch.save(model.state_dict(), f"{folder}/model.pt")
    """
    if current.world().placement.rank != 0:
        return None
    return os.environ.get("SM_MODEL_DIR") or str(_base() / "model")


def checkpoint_dir() -> str:
    """Return the folder that SageMaker copies to S3 while the job runs, and restores when it restarts.

    It exists on every host if the estimator has a ``checkpoint_s3_uri``. Either give
    each rank's files different names, or write only on rank 0.

    Example::

        path = f"{polyhvd.sagemaker.checkpoint_dir()}/last.pt"
    """
    return str(_base() / "checkpoints")


def _hyperparameters() -> dict[str, Any]:
    """The user's, each read as JSON where it is: estimators send texts."""
    path = _base() / "input/config/hyperparameters.json"
    if not path.exists():
        return {}
    found = _object(path, f"{path}: {{}}")
    return {name: _parsed(value) for name, value in found.items() if not name.startswith("sagemaker_")}


def _object(path: Path, complaint: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(complaint.format(error.strerror)) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(complaint.format(f"is not JSON: {error}")) from None
    if not isinstance(found, dict):
        raise ValueError(complaint.format("is not an object in JSON"))
    return found


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}={item}" for name, item in sorted(value.items()))
    return str(value)

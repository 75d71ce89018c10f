"""``polyhvdrun --config-file``: settings from a YAML file with horovodrun's keys. Needs PyYAML when used."""

from __future__ import annotations

import contextlib
import difflib
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["KEYS", "ConfigFileError", "read", "settings_of"]

_NEEDS_YAML = "--config-file needs PyYAML: pip install 'polyhvd[launcher]'"
_IGNORED = "_without_effect"


class ConfigFileError(ValueError):
    """A file of settings that cannot be used."""


@dataclass(frozen=True)
class _Key:
    variable: str  # of the ranks, as options name it
    kind: str  # "switch", "number", "text" or "cores"
    opposite: bool = False  # a switch that means the opposite of the variable


#: Sections and their keys. ``controller`` stands beside them.
KEYS: dict[str, dict[str, _Key]] = {
    "params": {
        "fusion_threshold_mb": _Key("FUSION_THRESHOLD", "number"),
        "cycle_time_ms": _Key("CYCLE_TIME", "number"),
        "cache_capacity": _Key("CACHE_CAPACITY", "number"),
        "hierarchical_allreduce": _Key("HIERARCHICAL_ALLREDUCE", "switch"),
        "hierarchical_allgather": _Key(_IGNORED, "switch"),
        "torus_allreduce": _Key(_IGNORED, "switch"),
    },
    "autotune": {
        "enabled": _Key("AUTOTUNE", "switch"),
        "log_file": _Key("AUTOTUNE_LOG", "text"),
        "warmup_samples": _Key("AUTOTUNE_WARMUP_SAMPLES", "number"),
        "steps_per_sample": _Key("AUTOTUNE_STEPS_PER_SAMPLE", "number"),
        "bayes_opt_max_samples": _Key("AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "number"),
        "gaussian_process_noise": _Key("AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "number"),
    },
    "timeline": {
        "filename": _Key("TIMELINE", "text"),
        "mark_cycles": _Key("TIMELINE_MARK_CYCLES", "switch"),
    },
    "stall_check": {
        "enabled": _Key("STALL_CHECK_DISABLE", "switch", opposite=True),
        "warning_time_seconds": _Key("STALL_CHECK_TIME_SECONDS", "number"),
        "shutdown_time_seconds": _Key("STALL_SHUTDOWN_TIME_SECONDS", "number"),
    },
    "library_options": {
        "mpi_threads_disable": _Key("MPI_THREADS_DISABLE", "switch"),
        "num_nccl_streams": _Key(_IGNORED, "number"),
        "thread_affinity": _Key("THREAD_AFFINITY", "cores"),
        "gloo_timeout_seconds": _Key("DATA_TIMEOUT_SECONDS", "number"),
    },
    "logging": {
        "level": _Key("LOG_LEVEL", "text"),
        "with_timestamp": _Key("LOG_HIDE_TIME", "switch", opposite=True),
    },
}
_CONTROLLER = "controller"
#: Of a file; no set of all keys comes near it.
_CHARACTERS_MAX = 1 << 20


def read(path: str, warn: Callable[[str], None]) -> dict[str, str]:
    """Read a file; its settings are as of :func:`settings_of`.

    Args:
        path: of the file.
        warn: called with a line for each unknown key.

    Raises:
        ConfigFileError: there is no PyYAML; the file cannot be read, is not YAML, or has a wrong type.
    """
    try:
        import yaml
    except ImportError:
        raise ConfigFileError(_NEEDS_YAML) from None

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_CHARACTERS_MAX + 1)
        if len(text) > _CHARACTERS_MAX:
            raise ConfigFileError(f"which is longer than {_CHARACTERS_MAX} characters: is it another file?")
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        _check_twice(root)
        content = None if root is None else loader.construct_document(root)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"cannot read --config-file {path}: {error}") from None
    except ConfigFileError as error:
        raise ConfigFileError(f"--config-file {path}, {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else path
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigFileError(f"--config-file {where}: this is not YAML: {problem}") from None
    except (TypeError, ValueError, RecursionError) as error:  # a date that is none, a mapping in itself, ...
        raise ConfigFileError(f"--config-file {path}: this is not valid YAML: {error}") from None
    return settings_of(content, f"--config-file {path}", warn)


def settings_of(content: Any, where: str, warn: Callable[[str], None]) -> dict[str, str]:
    """The settings in a file: variables of the ranks, as options name them, and "controller".

    Args:
        content: of the file, as YAML's mappings, numbers, switches and texts.
        where: begins each message.
        warn: called with a line for each unknown key, which is ignored as horovodrun ignores it.

    Raises:
        ConfigFileError: a value of another kind.

    Example::

        settings_of({"stall_check": {"enabled": False}}, "x.yaml", print)  # {"STALL_CHECK_DISABLE": "1"}
    """
    settings: dict[str, str] = {}
    for section, values in _mapping(content, where, "a mapping of sections").items():
        if not _is_known(section, [_CONTROLLER, *KEYS], where, warn) or values is None:
            continue
        if section == _CONTROLLER:
            name = str(values).lower()
            if name not in ("mpi", "gloo"):
                raise ConfigFileError(f"{where}: {_CONTROLLER}: expected mpi or gloo, found {values!r}")
            settings[_CONTROLLER] = name
            continue
        for key, value in _mapping(values, f"{where}: {section}", "a mapping").items():
            if _is_known(key, list(KEYS[section]), f"{where}: {section}", warn) and value is not None:
                row = KEYS[section][key]
                settings[row.variable] = _text(value, row, f"{where}: {section}.{key}")
    settings.pop(_IGNORED, None)
    return settings


def _check_twice(root: Any) -> None:
    """Raise ConfigFileError if a key is repeated: YAML forbids this, but PyYAML uses the last value."""
    sections = [value for _, value in root.value] if getattr(root, "id", "") == "mapping" else []
    for node in (root, *sections):
        seen: set[str] = set()
        for key, _ in node.value if getattr(node, "id", "") == "mapping" else ():
            if str(key.value) in seen:
                raise ConfigFileError(f"line {key.start_mark.line + 1}: {key.value!r} is repeated")
            seen.add(str(key.value))


def _mapping(value: Any, where: str, expected: str) -> Mapping[Any, Any]:
    if value is None:  # all of it is commented out
        return {}
    if not isinstance(value, Mapping):
        raise ConfigFileError(f"{where}: expected {expected}, found {reprlib.repr(value)}")
    return value


def _is_known(key: Any, names: list[str], where: str, warn: Callable[[str], None]) -> bool:
    if isinstance(key, str) and key in names:
        return True
    near = difflib.get_close_matches(str(key), names, 1)
    meant = f"was {near[0]!r} meant? " if near else ""
    warn(f"{where}: unknown key {reprlib.repr(key)} is ignored; {meant}known keys are {', '.join(names)}")
    return False


def _text(value: Any, key: _Key, where: str) -> str:
    if key.kind == "number" and isinstance(value, str):
        with contextlib.suppress(ValueError):  # PyYAML has 1e3 for a text
            value = float(value)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if key.kind == "switch":
        if not isinstance(value, bool):
            raise ConfigFileError(f"{where}: expected true or false, found {reprlib.repr(value)}")
        return "1" if value != key.opposite else "0"
    if key.kind == "number" and not (number and math.isfinite(value) and value >= 0):
        raise ConfigFileError(f"{where}: expected a number, 0 or more, found {reprlib.repr(value)}")
    if key.kind == "text" and not isinstance(value, str):
        raise ConfigFileError(f"{where}: expected a string, found {reprlib.repr(value)}")
    if "\0" in str(value):
        raise ConfigFileError(f"{where}: a string with a zero byte cannot be an environment variable")
    if key.kind == "cores" and not isinstance(value, (int, str)):
        raise ConfigFileError(
            f"{where}: expected the numbers of cores, as 0 or '0,1', found {reprlib.repr(value)}"
        )
    return str(value)

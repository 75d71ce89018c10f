"""Finds good values for what may change while a job runs; on world rank 0, for all ranks.

Bayesian optimisation: a Gaussian process models the speed over a grid of values, and the point with
the highest expected improvement is tried next (D. Jones et al., "Efficient Global Optimization of
Expensive Black-Box Functions", J. Global Optimization 13, 1998). No result depends on these values.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import itertools
import json
import logging
import os
import stat
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from polyhvd import _core
from polyhvd.config import ConfigError, Settings
from polyhvd.observe.files import FULL, opener
from polyhvd.runtime.world import World

__all__ = ["GRID", "Autotuner", "Search", "begin", "plot", "summary"]

_LOG = logging.getLogger("polyhvd")

#: Values of each field of a tuning, in order.
GRID: dict[str, tuple[int, ...]] = {
    "fusion_bytes_max": tuple(1 << n for n in range(20, 29)),
    "cycle_us": (0, 100, 200, 500, 1000, 2000, 5000),
    "chunk_bytes": tuple(1 << n for n in range(13, 18)),
    "direct_bytes_max": tuple(1 << n for n in range(12, 20)),
}
Point = tuple[int, ...]  # an index into each field's values
_NOISE_MIN = 1e-4
_FIRST_POINTS = 5  # spread over the grid before the model is used
#: Raised when a cache that another program has written is read.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)
_COLUMNS = ("phase", *GRID, "steps", "bytes", "seconds", "bytes_per_second")


class Search:
    """Proposes points of a grid, receives their values, and finds the highest one. Deterministic.

    Args:
        sizes: number of values along each dimension.
        start: the first point to propose.
        noise: upper bound of the noise, which is estimated: the variance of a single value as a share of the
            variance of all values.
    """

    def __init__(self, sizes: Sequence[int], start: Point, noise: float) -> None:
        self._sizes = tuple(sizes)
        self._noise = max(noise, 2 * _NOISE_MIN)
        self._grid = list(itertools.product(*(range(n) for n in sizes)))
        self._measured: list[tuple[Point, float]] = []
        self._first = [start, *self._spread(_FIRST_POINTS - 1)]

    def _spread(self, count: int) -> list[Point]:
        """Points that leave no large part of the grid out: a Sobol sequence."""
        from scipy.stats import qmc

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it likes powers of two
            unit = qmc.Sobol(len(self._sizes), scramble=False).random(count + 1)[1:]
        return [tuple(int(u * n) for u, n in zip(row, self._sizes, strict=True)) for row in unit]

    def next_point(self) -> Point:
        """The point to try next."""
        if len(self._measured) < len(self._first):
            return self._first[len(self._measured)]
        from scipy.stats import norm

        model = self._fitted()
        mean, deviation = model.predict(self._places(self._grid), return_std=True)
        gain = mean - model.predict(self._places([point for point, _ in self._measured])).max()
        deviation = np.maximum(deviation, 1e-12)
        z = gain / deviation
        return self._grid[int(np.argmax(gain * norm.cdf(z) + deviation * norm.pdf(z)))]

    def add(self, point: Point, value: float) -> None:
        """Add the value of a point; the same point may be added again."""
        self._measured.append((point, value))

    def best(self) -> Point:
        """The added point with the highest value, without noise."""
        points = [point for point, _ in self._measured]
        return points[int(np.argmax(self._fitted().predict(self._places(points))))]

    def _places(self, points: Sequence[Point]) -> np.ndarray[Any, Any]:
        """Points in the unit cube."""
        return np.array(points) / [max(n - 1, 1) for n in self._sizes]

    def _fitted(self) -> Any:
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern, WhiteKernel
        from threadpoolctl import threadpool_limits

        speed = Matern(length_scale=[1.0] * len(self._sizes), length_scale_bounds=(0.1, 20.0), nu=2.5)
        noise = WhiteKernel(noise_level=2 * _NOISE_MIN, noise_level_bounds=(_NOISE_MIN, self._noise))
        model = GaussianProcessRegressor(speed + noise, normalize_y=True)
        with warnings.catch_warnings(), threadpool_limits(1):  # the cores are the training's
            warnings.simplefilter("ignore")  # about values at their bounds
            model.fit(self._places([p for p, _ in self._measured]), [value for _, value in self._measured])
        return model


class Autotuner:
    """Takes samples of the speed, and chooses what to try next, until it has enough.

    Args:
        config: of rank 0.
        hosts: of all ranks; with the operations of a step, they identify a job.
        tune: hands a tuning to all ranks.
        appends: whether the log has samples of this job already, of a rank 0 that was lost.

    Raises:
        ConfigError: scikit-learn is missing.
        OSError: the log cannot be opened. A disk that is full is only warned of.
    """

    def __init__(
        self,
        settings: Settings,
        hosts: Sequence[str],
        tune: Callable[[_core.Tuning], None],
        *,
        appends: bool = False,
    ) -> None:
        if importlib.util.find_spec("sklearn") is None:
            raise ConfigError(
                "POLYHVD_AUTOTUNE=1 needs scikit-learn; install it with: pip install 'polyhvd[autotune]'"
            )
        self._tune = tune
        self._settings = settings
        self._topology = sorted(Counter(hosts).values())
        start = {
            "fusion_bytes_max": settings.fusion_bytes_max,
            "cycle_us": round(settings.cycle_time_ms * 1000),
            "chunk_bytes": 128 << 10,
            "direct_bytes_max": 128 << 10,
        }
        self._search = Search(
            [len(values) for values in GRID.values()],
            tuple(_nearest(values, start[name]) for name, values in GRID.items()),
            settings.autotune_noise,
        )
        self._point = self._search.next_point()
        self._warmup_remaining = settings.autotune_warmup_samples
        self._samples = 0
        self._file: TextIO | None = None
        if settings.autotune_log:
            self._open_log(appends=appends)
        #: Whether the search has ended.
        self.done = False
        self._tune(_tuning(self._point))  # begins the first sample

    def go_on(self, hosts: Sequence[str], tune: Callable[[_core.Tuning], None]) -> bool:
        """Continue in the next world of an elastic job; the sample that was under way is repeated.

        Args:
            hosts: of all ranks.
            tune: hands a tuning to all ranks.

        Returns:
            False: that world has other numbers of ranks on its hosts, and what was found is not for it.
        """
        if sorted(Counter(hosts).values()) != self._topology:
            return False
        self._tune = tune
        self._tune(_tuning(self._point))
        return True

    def close(self) -> None:
        """Close the log."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # for unwritten data, which was reported
                self._file.close()
            self._file = None

    def observe(self, sample: _core.StepSample) -> None:
        """Learn how fast the job was with what it works with; may tune it."""
        if self.done:
            return
        speed = sample.bytes / sample.seconds if sample.seconds > 0 else 0.0
        known = self._saved().get(self._key(sample)) if self._warmup_remaining else None
        if known is not None:
            self._log_sample("saved", known, sample, speed)
            self._end(known, f"as {self._settings.autotune_cache} has it")
            return
        if self._warmup_remaining > 0:
            self._warmup_remaining -= 1
            self._log_sample("warm-up", self._point, sample, speed)
            self._tune(_tuning(self._point))  # begins the next sample
            return
        self._log_sample("sample", self._point, sample, speed)
        self._search.add(self._point, speed)
        self._samples += 1
        if self._samples < self._settings.autotune_samples_max:
            self._point = self._search.next_point()
            self._tune(_tuning(self._point))
            return
        best = self._search.best()
        self._log_sample("best", best, sample, None)
        self._save(self._key(sample), best)
        self._end(best, f"after {self._samples} samples")

    def _end(self, point: Point, why: str) -> None:
        self.done, self._point = True, point
        self._tune(_tuning(point))
        values = ", ".join(f"{name}={value}" for name, value in _values(point).items())
        _LOG.info("autotune: %s (%s)", values, why)
        self.close()

    def _log_sample(self, phase: str, point: Point, sample: _core.StepSample, speed: float | None) -> None:
        row: list[Any] = [phase, *_values(point).values()]
        if speed is not None:
            row += [sample.steps, sample.bytes, f"{sample.seconds:.6f}", f"{speed:.0f}"]
        self._write(row)

    def _write(self, row: Sequence[Any]) -> None:
        if self._file is None:
            return
        try:
            csv.writer(self._file).writerow(row)
            self._file.flush()
        except OSError as error:
            self._close_log(error)

    def _open_log(self, *, appends: bool) -> None:
        path, mode = self._settings.autotune_log, os.O_APPEND if appends else os.O_TRUNC
        try:
            made = opener(path, os.O_WRONLY | os.O_CREAT | mode)
            self._file = os.fdopen(made, "w", newline="", encoding="utf-8")
            if os.fstat(made).st_size == 0:
                self._write(_COLUMNS)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._close_log(error)

    def _close_log(self, error: OSError) -> None:
        path = self._settings.autotune_log
        _LOG.warning("autotune: the log %s ends here, and tuning continues: %s", path, error)
        with contextlib.suppress(OSError):
            found = os.stat(path)
            if stat.S_ISREG(found.st_mode) and found.st_size == 0:
                os.unlink(path)
        self.close()

    # Results of earlier jobs ---------------------------------------------------

    def _key(self, sample: _core.StepSample) -> str:
        return f"ranks {self._topology}, step {sample.fingerprint:016x}"

    def _saved(self) -> dict[str, Point]:
        path = self._settings.autotune_cache
        if not path or not os.path.exists(path):
            return {}
        try:
            with open(path, encoding="utf-8", opener=opener) as file:
                rows = json.load(file)
            return {
                key: tuple(_nearest(values, int(row[name])) for name, values in GRID.items())
                for key, row in rows.items()
            }
        except _UNREADABLE as error:
            _LOG.warning("autotune: %s cannot be read, and is not used: %r", path, error)
            return {}

    def _save(self, key: str, point: Point) -> None:
        if not self._settings.autotune_cache:
            return
        path = Path(self._settings.autotune_cache)
        rows = {known: _values(at) for known, at in self._saved().items()} | {key: _values(point)}
        made = ""
        try:
            # In one go: another job may read it.
            with tempfile.NamedTemporaryFile(
                "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
            ) as file:
                made = file.name
                json.dump(rows, file, indent=1)
            os.replace(made, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(made)
            _LOG.warning("autotune: the result cannot be saved: %s", error)


def begin(world: World, former: Autotuner | None) -> Autotuner:
    """Have rank 0 tune a world whose settings ask for it.

    Args:
        world: that this process is entering.
        former: of a former world of an elastic job; it continues if this one has the same layout.
    """
    tune = world.engine.tune
    if former is not None and not former.go_on(world.hosts, tune):
        former.close()
        former = None
    appends = world.placement.generation > 1
    tuner = former or Autotuner(world.settings, world.hosts, tune, appends=appends)
    world.on_sample(tuner.observe)
    return tuner


def _nearest(values: Sequence[int], wanted: int) -> int:
    """Index of the value nearest to ``wanted``, by ratio."""
    return int(np.argmin([abs(np.log2(max(value, 1) / max(wanted, 1))) for value in values]))


def _values(point: Point) -> dict[str, int]:
    return {name: values[i] for (name, values), i in zip(GRID.items(), point, strict=True)}


def _tuning(point: Point) -> _core.Tuning:
    return _core.Tuning(**_values(point))


# Reading logs ------------------------------------------------------------------


def _rows(path: Path) -> list[dict[str, str]]:
    """The whole lines of a log: a full disk may have cut off the last one."""
    text = path.read_text(encoding="utf-8", errors="replace")
    reader = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    try:
        if tuple(reader.fieldnames or ()) != _COLUMNS:
            raise ValueError(f"its columns are {str(reader.fieldnames)[:80]}")
        return [_checked(row) for row in reader]
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path} is not a log of POLYHVD_AUTOTUNE_LOG: {error}") from None


def _checked(row: dict[str, str]) -> dict[str, str]:
    """The row itself; raises ValueError if it has no numbers."""
    values = [row[name] for name in (*GRID, *(["bytes_per_second"] if row["phase"] == "sample" else []))]
    try:
        for value in values:
            float(value)
    except (TypeError, ValueError):
        raise ValueError(f"expected numbers, found {str(values)[:80]}") from None
    return row


def summary(path: Path) -> list[str]:
    """Summarize a log: the first sample, the fastest one, and the choice, which a cache may have had.

    Raises:
        OSError, ValueError: the file cannot be read, or is not a log.
    """
    rows = _rows(path)
    samples = [row for row in rows if row["phase"] == "sample"]
    chosen = [row for row in rows if row["phase"] in ("best", "saved")]
    if not samples and not chosen:
        return [f"{path}: no samples yet ({len(rows)} of the warm-up)"]

    def line(title: str, row: dict[str, str]) -> str:
        speed = f"{float(row['bytes_per_second']) / 1e9:.3f} GB/s with " if row["bytes_per_second"] else ""
        return f"{title}: {speed}{', '.join(f'{name}={row[name]}' for name in GRID)}"

    lines = [line("chosen", row) for row in chosen]
    if samples:
        fastest = max(samples, key=lambda row: float(row["bytes_per_second"]))
        lines = [line("first", samples[0]), line(f"fastest of {len(samples)}", fastest), *lines]
    return lines


def plot(path: Path, out: Path) -> list[str]:
    """Draw the search that a log has recorded: speed by sample, and by each value.

    Raises:
        OSError, ValueError: a file cannot be used, or is not a log; matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(f"--plot needs matplotlib ({error}): pip install 'polyhvd[autotune]'") from None

    matplotlib.use("Agg")
    from matplotlib import pyplot

    samples = [row for row in _rows(path) if row["phase"] == "sample"]
    if not samples:
        raise ValueError(f"{path} has no samples yet")
    speeds = np.array([float(row["bytes_per_second"]) for row in samples]) / 1e9
    figure, (first, *others) = pyplot.subplots(
        1, 1 + len(GRID), figsize=(16, 3.5), sharey=True, layout="constrained"
    )
    first.plot(np.arange(1, len(speeds) + 1), speeds, "o-", label="sample")
    first.plot(np.arange(1, len(speeds) + 1), np.maximum.accumulate(speeds), "--", label="fastest so far")
    first.set(xlabel="sample", ylabel="GB/s over whole steps")
    first.legend()
    for axes, name in zip(others, GRID, strict=True):
        axes.plot([int(row[name]) for row in samples], speeds, "o")
        axes.set_xscale("symlog", base=2, linthresh=1)
        axes.set(xlabel=name)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
    return [f"{out}: {len(samples)} samples"]

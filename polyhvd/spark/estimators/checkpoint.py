"""The checkpoint of a run: the framework's own file of model and optimizer, and what the run has done.

Both are in one file, a ZIP archive, which the store replaces as a whole: ``state`` and ``run.json``.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from polyhvd.errors import DataError

__all__ = ["Checkpoint"]


@dataclass
class Checkpoint:
    """A state between two epochs.

    Args:
        run: what identifies the fit: its parameters and its data.
        epochs: how many are done.
        history: the metrics of all of them, in the framework's form.
        shapes: of the model's outputs, without the axis of the rows.
        state: of model and optimizer, as the framework writes it.
        ended_epochs: the ``epochs`` of the last fit, if training ended before them, as callbacks can decide;
            else 0.
    """

    run: dict[str, Any]
    epochs: int = 0
    history: Any = None
    shapes: list[list[int]] = field(default_factory=list)
    state: bytes = b""
    ended_epochs: int = 0

    def require(self, run: Mapping[str, Any], run_id: str) -> None:
        """Raise ValueError unless it is one of this fit.

        Args:
            run: what identifies the fit; :attr:`run` may have more.
            run_id: for the message.
        """
        if {**self.run, **run} != self.run:
            raise ValueError(
                f"fit(): the store has a checkpoint of run_id {run_id!r}, which is one of other data, or of "
                "other rows for validation; pass another run_id, or none, as for CrossValidator"
            )

    def dump(self) -> bytes:
        """The file."""
        values = asdict(self)
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w") as archive:
            archive.writestr("state", values.pop("state"))
            archive.writestr("run.json", json.dumps(values, indent=1))
        return data.getvalue()

    @staticmethod
    def load(data: bytes, path: str) -> Checkpoint:
        """Read a file.

        Args:
            data: its bytes.
            path: for messages.

        Raises:
            DataError: it is not a checkpoint.
        """
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                return Checkpoint(state=archive.read("state"), **json.loads(archive.read("run.json")))
        except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{path!r} is not a checkpoint of an estimator ({type(error).__name__}: {error}); remove "
                "it, or pass another run_id"
            ) from error

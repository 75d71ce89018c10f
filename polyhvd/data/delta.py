"""Delta tables: which files of a folder are those of the table's current version.

The package deltalake reads the log. It is imported only for a folder that has one.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import unquote

from polyhvd.errors import DataError

__all__ = ["LOG", "files_of"]

#: The folder that makes another one a table.
LOG = "_delta_log"
#: Features of a table without which its files do not have its rows, or not by the names of the columns.
_REFUSED = {
    "deletionVectors": "run REORG TABLE ... APPLY (PURGE) and drop the feature",
    "columnMapping": "write the table again without column mapping",
}


def files_of(folder: str) -> tuple[list[str], dict[str, bool]]:
    """The files of the current version of a table, in the order of their paths, and its partition columns.

    Each column has the value of whether it is one of strings.

    Args:
        folder: its path on this host.

    Raises:
        ModuleNotFoundError: deltalake is not installed.
        DataError: the log cannot be read, or the table has features that are not supported.
    """
    import pyarrow as pa

    try:
        import deltalake
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{folder!r} is a Delta table, since it has a folder {LOG}; reading it needs deltalake, which "
            f"cannot be imported ({error}); install it with: pip install 'polyhvd[delta]'",
            name="deltalake",
        ) from error
    try:
        table: Any = deltalake.DeltaTable(os.path.abspath(folder))
        features = list(table.protocol().reader_features or ())
        types = {field.name: getattr(field.type, "type", "") for field in table.schema().fields}
        metadata = table.metadata()
        columns = {name: types[name] == "string" for name in metadata.partition_columns}
        paths = pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist()
    except Exception as error:  # deltalake's errors have no common class
        raise DataError(f"the Delta table {folder!r} cannot be read: {error}") from error
    # Tables of reader version 2 can have it, but have no list of features.
    if metadata.configuration.get("delta.columnMapping.mode", "none") != "none":
        features.append("columnMapping")
    for feature in features:
        if feature in _REFUSED:
            raise DataError(
                f"the Delta table {folder!r} has the feature {feature}, which is not supported; "
                f"{_REFUSED[feature]}, or read the table by Spark and write it with write_parquet"
            )
    if not paths:
        raise DataError(f"version {table.version()} of the Delta table {folder!r} has no files")
    return sorted(_local(folder, path) for path in paths), columns


def _local(folder: str, path: str) -> str:
    """The path of a file that a log has as a URI, relative to the table's folder or, in clones, absolute."""
    scheme, _, rest = path.rpartition("://")
    if scheme not in ("", "file"):
        raise DataError(f"the Delta table {folder!r} has the file {path}, which is not in a local folder")
    return os.path.join(os.path.abspath(folder), unquote(rest))

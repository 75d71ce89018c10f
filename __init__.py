"""Hands over to the package when a program that lies beside a clone imports the clone's own folder.

Python takes a clone's folder ``polyhvd`` for the package ``polyhvd``, which lies one folder below.
"""

from pathlib import Path

__file__ = str(Path(__file__).parent / "polyhvd" / "__init__.py")
__path__ = [str(Path(__file__).parent)]
exec(compile(Path(__file__).read_bytes(), __file__, "exec"))

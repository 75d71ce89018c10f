"""Every collective that users may call, as data: its arguments, its results, its errors, its documentation.

``make verbs`` makes ``frameworks/NAME/verbs.py`` of it, for every framework that has a ``dialect.py``. A new
argument is a :class:`Parameter` in parameters.py and its name in the order of a family in verbs.py; a new
collective is a :class:`Family` and a :class:`Verb` for each of its forms. What they do is a method of
:class:`polyhvd.collectives.functions.Functions` by the same name. Nothing here is imported when polyhvd is
used.

``frameworks/NAME/wrappers.py`` is made of options.py in the same way, where there is a ``signatures.py``.
"""

from __future__ import annotations

from polyhvd.collectives.table.parameters import PARAMETERS
from polyhvd.collectives.table.schema import Dialect, Family, Parameter, Verb
from polyhvd.collectives.table.verbs import FAMILIES, RAISES, VERBS

__all__ = ["FAMILIES", "PARAMETERS", "RAISES", "VERBS", "Dialect", "Family", "Parameter", "Verb"]

"""Making the package of a new operator, from the files in ``templates/operator`` and the operator's schema.

``overloads`` finds the operator, ``calls`` the calls that it takes, ``place`` what its package is imported as;
``package`` writes the files, ``project`` the line in ``pyproject.toml``.
"""

from __future__ import annotations

from twinkle.aten.scaffold.overloads import check_free, is_taken_apart, overload_of
from twinkle.aten.scaffold.package import make
from twinkle.aten.scaffold.place import Place
from twinkle.aten.scaffold.project import add_entry_point

__all__ = ["Place", "add_entry_point", "check_free", "is_taken_apart", "make", "overload_of"]

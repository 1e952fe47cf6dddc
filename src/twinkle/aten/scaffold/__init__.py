"""Making the package of a new operator, from the files in ``templates/operator`` and the operator's schema.

``overloads`` finds the operator, ``calls`` the calls that it takes, ``package`` writes the files.
"""

from __future__ import annotations

from twinkle.aten.scaffold.overloads import overload_of
from twinkle.aten.scaffold.package import add_entry_point, make

__all__ = ["add_entry_point", "make", "overload_of"]

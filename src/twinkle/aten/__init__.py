"""The ATen level: kernels under PyTorch's own operators, registered, counted, proved and taken back.

An operator's package declares an :class:`OperatorSpec`; ``register_a1`` and the rest of it are derived from that.
:func:`install` registers several operators by name.
"""

from __future__ import annotations

from twinkle.aten.errors import NotRegistrableError, RegistrationError
from twinkle.aten.home import Home
from twinkle.aten.installation import install
from twinkle.aten.profiles import Profile, profile, profiles
from twinkle.aten.spec import Condition, Kernel, OperatorSpec, Semantics

__all__ = [
    "Condition",
    "Home",
    "Kernel",
    "NotRegistrableError",
    "OperatorSpec",
    "Profile",
    "RegistrationError",
    "Semantics",
    "install",
    "profile",
    "profiles",
]

"""Ops ``qk_norm_rotary`` and ``add_rms_norm``: an RMSNorm together with what comes right after or before it.

Opt-in, under the logical keys ``'fused_qk'`` and ``'fused_add_norm'``. Both put a kernel in the place of statements of
a model's forward and leave the rest of it as it is.

Which statements those are says ``patterns``; how a function gets others, whatever it is, ``rewriting``; whether a call
may go past a norm's module, ``norms``; and ``installer`` puts the three together. The kernels know nothing of that:
``qk_*`` and ``add_*``, each with the maths in ``*_reference``.
"""

from __future__ import annotations

from twinkle.kernel.ops.backends import ON_TRITON, TRITON, backend
from twinkle.kernel.registry import lazy_import, register_op

_HERE = "twinkle.kernel.ops.fused_norms"

register_op(
    "qk_norm_rotary",
    reference=f"{_HERE}.qk_reference",
    implementations={"triton": backend(f"{_HERE}.qk_triton", available=TRITON, accepts=ON_TRITON)},
    installer=lazy_import(f"{_HERE}.installer:install_qk"),
    concerns=lazy_import(f"{_HERE}.installer:has_qk"),
    scope="model",
)

register_op(
    "add_rms_norm",
    reference=f"{_HERE}.add_reference",
    implementations={"triton": backend(f"{_HERE}.add_triton", available=TRITON, accepts=ON_TRITON)},
    installer=lazy_import(f"{_HERE}.installer:install_add"),
    concerns=lazy_import(f"{_HERE}.installer:has_add"),
    scope="model",
)

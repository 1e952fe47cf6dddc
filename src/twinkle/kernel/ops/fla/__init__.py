"""Op ``fla``: the linear-attention functions of gated delta-net layers, process-wide."""

from __future__ import annotations

from twinkle.kernel.registry import KernelImpl, lazy_import, register_op

_HERE = "twinkle.kernel.ops.fla"

register_op(
    "fla",
    implementations={
        "fla": KernelImpl(
            lazy_import(f"{_HERE}.library:load"),
            lazy_import(f"{_HERE}.library:available"),
            lazy_import(f"{_HERE}.library:accepts"),
        ),
        "npu": KernelImpl(
            lazy_import(f"{_HERE}.npu:load"),
            lazy_import(f"{_HERE}.npu:available"),
            lazy_import(f"{_HERE}.npu:accepts"),
        ),
        "torch": KernelImpl(
            lazy_import(f"{_HERE}.torch:load"), lazy_import("twinkle.kernel.ops.torch_support:available")
        ),
    },
    installer=lazy_import(f"{_HERE}.installer:install"),
    concerns=lazy_import(f"{_HERE}.installer:is_gated_delta_net"),
)

"""The ``fla`` backend: flash-linear-attention's Triton kernels, on NVIDIA GPUs and Ascend NPUs."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from twinkle.environment import switch
from twinkle.kernel.ops.fla.calls import functions
from twinkle.kernel.ops.torch_support import DTYPES
from twinkle.naming import version_of
from twinkle.platforms import platform_of
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

DEVICES = ("cuda", "npu")
ON_NPU = "TWINKLE_NPU_FLA"
"""The switch that, when off, leaves gated delta-nets on an NPU to transformers' own functions."""

RULES = "fla.ops.gated_delta_rule"
CONVOLUTIONS = ("fla.modules.causal_conv1d", "fla.modules.convolution")
"""Where the convolution is, in newer and in older versions."""


def available() -> tuple[bool, Reason | None]:
    """Whether a device is here that the library's kernels run on, the package, and its functions.

    The package is imported, which takes seconds, only when a device is there: it imports on a CPU, but runs nothing.
    """
    if not any(platform_of(kind) for kind in DEVICES):
        return False, Reason("no-device", f"flash-linear-attention needs {' or '.join(DEVICES)}", _way_out())
    if importlib.util.find_spec("fla") is None:
        hint = "pip install --no-deps flash-linear-attention fla-core einops"
        return False, Reason("no-package", "the package flash-linear-attention is not installed", hint)
    try:
        _functions()
    except Exception as error:
        return False, Reason.of_error(error, "broken-package", "importing flash-linear-attention")
    return True, None


def _way_out() -> str | None:
    """What to do where transformers will call the library although it can't run."""
    if importlib.util.find_spec("fla") is None:
        return None
    return (
        "transformers calls it here all the same, since it is installed, and fails: uninstall it, or map "
        "'fla' to KernelChoice('fla', ('torch',))"
    )


_RULE = ("g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens")
_CONVOLUTION = ("x", "weight", "bias", "activation", "cu_seqlens")
"""What the functions are given by name."""


def _functions() -> tuple[Any, Any, Any]:
    """Both rules and the convolution.

    Raises:
        ImportError: the installed version has them elsewhere, or with other parameters; its ``**kwargs`` would swallow
            what it doesn't know.
    """
    rules = importlib.import_module(RULES)
    for name in CONVOLUTIONS:
        try:
            convolutions = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        break
    else:
        raise ModuleNotFoundError(f"none of {', '.join(CONVOLUTIONS)}")
    found = rules.chunk_gated_delta_rule, rules.fused_recurrent_gated_delta_rule, convolutions.causal_conv1d
    for function, wanted in zip(found, (_RULE, _RULE, _CONVOLUTION), strict=True):
        lacks = [one for one in wanted if one not in inspect.signature(function).parameters]
        if lacks:
            raise ImportError(f"{function.__name__} has no parameter {', '.join(lacks)}: a newer version may")
    return found


def accepts(site: Site) -> Reason | None:
    """A model on a device that the kernels run on."""
    kind = site.device.type
    if kind not in DEVICES:
        return Reason("device", f"flash-linear-attention runs on {' and '.join(DEVICES)}, not on {kind}", _way_out())
    return switched_off(site)


def switched_off(site: Site) -> Reason | None:
    """The reason of a site on an NPU while the switch is off."""
    if site.device.type == "npu" and not switch(ON_NPU, True):
        return Reason("switched-off", f"{ON_NPU} is off", f"unset {ON_NPU}")
    return None


def load(target: Any) -> dict[str, Callable[..., Any]]:
    """Functions by name; the library wants the convolution's input as ``[B, T, D]``."""
    chunk, fused_recurrent, convolve = _functions()

    def rule(function: Any) -> Any:
        def call(query, key, value, g, beta, state, wanted, normalised, bounds):  # type: ignore[no-untyped-def]
            return function(
                query,
                key,
                value,
                g=g,
                beta=beta,
                initial_state=state,
                output_final_state=wanted,
                use_qk_l2norm_in_kernel=normalised,
                cu_seqlens=bounds,
            )

        return call

    def convolution(x, weight, bias, activation, bounds):  # type: ignore[no-untyped-def]
        x = x.transpose(1, 2).contiguous()
        out, _ = convolve(x=x, weight=weight, bias=bias, activation=activation, cu_seqlens=bounds)
        return out.transpose(1, 2)

    return functions(rule(chunk), rule(fused_recurrent), convolution, _chunk_reason, _reason, _recurrent_reason)


def _reason(*tensors: torch.Tensor | None) -> str | None:
    """Why a call isn't for the library's kernels; the first tensor says where and in what."""
    first = tensors[0]
    assert first is not None
    if first.device.type not in DEVICES:
        return f"the tensors are on {first.device.type}"
    if first.dtype not in DTYPES:
        return "the dtype is none of bf16, fp16, fp32"
    return None


def _chunk_reason(*tensors: torch.Tensor | None) -> str | None:
    """The same of the chunked rule, whose gradient some versions of Triton compile wrongly."""
    first = tensors[0]
    assert first is not None
    return _reason(*tensors) or (wrong_gradient(first.device) if _wants_gradient(tensors) else None)


def _recurrent_reason(*tensors: torch.Tensor | None) -> str | None:
    """The same of the recurrent rule, whose backward the library leaves out."""
    if _wants_gradient(tensors):
        return "flash-linear-attention's recurrent rule has no gradient"
    return _reason(*tensors)


def _wants_gradient(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


WRONG_FROM, RIGHT_AGAIN = (3, 4), (3, 7, 1)
"""The versions of Triton from and until which that gradient is wrong on Hopper GPUs, by the library's issue 640. It
refuses it there itself, in the backward; its versions before 0.5 compute it all the same."""


@functools.lru_cache(maxsize=64)
def wrong_gradient(device: torch.device) -> str | None:
    """Why the gradient of the chunked rule can't be had on a device; None where it can."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    triton = version_of("triton") or version_of("pytorch-triton") or "3.4 or newer"  # it is there, or fla weren't
    numbers = tuple(map(int, re.findall(r"\d+", triton)[:3]))
    if not WRONG_FROM <= numbers < RIGHT_AGAIN or importlib.util.find_spec("tilelang") is not None:
        return None
    return (
        f"Triton {triton} computes the gradient of flash-linear-attention's chunked rule wrongly on this GPU: "
        f"Triton {'.'.join(map(str, RIGHT_AGAIN))} or the package tilelang is needed"
    )

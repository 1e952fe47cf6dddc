"""When a kernel's numbers are right.

With the reference in fp64 and ``e`` the distance to it, for the output and for every gradient,
``e_kernel <= 2 * e_original + ulp(dtype) * |reference|``, in the Euclidean and in the maximum norm. So a kernel may
round differently than the original, but not be a worse approximation of the maths.

A kernel as exact as the original is beyond twice its error now and then, by chance alone; what is off is off for most
inputs. So where there are several inputs, what counts is the median over them, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SURE = 2.0
"""A median over this is off at once: no tensor of a kernel as exact as the original got there by chance, for any of 45
inputs."""


def allowed_error_used(kernel: torch.Tensor, original: torch.Tensor, reference: torch.Tensor) -> float:
    """How much of the allowed error a kernel's result has used up: at most 1 is within the judgement.

    Args:
        kernel, original: results in the dtype that is judged, same shape. Those that are no floating-point numbers
            must be equal.
        reference: the same computed in fp64.

    Returns:
        the larger of the two norms' ratios; inf for another shape, another dtype, or a non-finite value that the
        original doesn't have.
    """
    import torch

    if kernel.shape != original.shape or kernel.dtype != original.dtype:
        return float("inf")
    if not original.is_floating_point():
        return 0.0 if torch.equal(kernel, original) else float("inf")
    ulp = torch.finfo(original.dtype).eps
    k, o, r = (t.detach().to("cpu", torch.float64).flatten() for t in (kernel, original, reference))
    finite = torch.isfinite(o)
    same_gaps = torch.allclose(k[~finite], o[~finite], equal_nan=True)  # inf where it has inf, NaN where it has NaN
    if not same_gaps or not torch.isfinite(k[finite]).all():
        return float("inf")
    finite &= torch.isfinite(r)
    k, o, r = k[finite], o[finite], r[finite]
    if k.numel() == 0:
        return 0.0
    used = 0.0
    for norm in (2, float("inf")):
        error, size = torch.linalg.vector_norm(k - r, norm), torch.linalg.vector_norm(r, norm)
        allowed = 2 * torch.linalg.vector_norm(o - r, norm) + ulp * size
        used = max(used, float(error / allowed) if error > 0 else 0.0)
    return used


def after_second_look(medians: Mapping[str, float], anew: Callable[[], Mapping[str, float]]) -> dict[str, float]:
    """Medians by tensor, where those that are over 1, but not surely, are replaced by those over other inputs.

    The first inputs don't count again: they made the tensor a suspect.

    Args:
        medians: of shares of the allowed error.
        anew: measures them with other inputs; called only where there is a suspect. A tensor that it leaves out keeps
            its median.
    """
    suspects = [name for name, median in medians.items() if 1 < median <= SURE]
    if not suspects:
        return dict(medians)
    found = anew()
    return {**medians, **{name: found[name] for name in suspects if name in found}}

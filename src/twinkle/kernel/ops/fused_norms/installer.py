"""Puts the fused norms into the forwards of attention modules and decoder layers.

A module's forward is replaced by its own code with a few statements changed. Their place is taken by a call of
``fused``, which is the kernel, or where that can't serve a call, the very modules and functions that stood there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn

from twinkle.kernel.calls import as_original, counted, router_of
from twinkle.kernel.install import obstacle
from twinkle.kernel.journal import Refused, patch_of
from twinkle.kernel.ops.fused_norms.norms import Norm, norm_of
from twinkle.kernel.ops.fused_norms.patterns import FUSED, Found, norms_and_rotary, sum_and_norm
from twinkle.kernel.ops.fused_norms.qk_reference import DIALECT
from twinkle.kernel.ops.fused_norms.rewriting import body_of, rewritten
from twinkle.kernel.ops.hooks import hooks_for_all
from twinkle.kernel.ops.rms_norm.layers import weight_of
from twinkle.kernel.ops.rotary import reference as rotary_reference
from twinkle.kernel.ops.rotary.reference import SIGNATURES
from twinkle.kernel.probe import variant_of
from twinkle.kernel.reclass import peel
from twinkle.kernel.targets import ModelIndex, Site
from twinkle.kernel.undo import active_transaction, patch_method
from twinkle.kernel.wrappers import undecorated
from twinkle.reasons import Counts, Reason

Make = Callable[[Any], Callable[..., Any]]
"""From a forward to the one to install, see :func:`~twinkle.kernel.undo.patch_method`."""


def install_qk(model: nn.Module, target: Any, impl: Callable[..., Any]) -> int:
    """Lets attention modules normalise and rotate queries and keys by one kernel.

    Args:
        impl: see :mod:`twinkle.kernel.ops.fused_norms.qk_reference`.

    Returns:
        the number of attention modules.

    Raises:
        Refused: there are some with norms of queries and keys, but their code is another one.
    """
    return _install(model, impl, has_qk, norms_and_rotary, _fused_qk)


def install_add(model: nn.Module, target: Any, impl: Callable[..., Any]) -> int:
    """Lets decoder layers add to the residual and normalise the sum by one kernel.

    Args:
        impl: see :mod:`twinkle.kernel.ops.fused_norms.add_reference`.

    Returns:
        the number of layers.

    Raises:
        Refused: there are some, but their code is another one, or none of their norms is an RMSNorm.
    """
    return _install(model, impl, has_add, sum_and_norm, _fused_add)


def has_qk(module: Any) -> bool:
    """Whether a module seems to normalise queries and keys; what it really does its code says."""
    norms = [name for name, child in module._modules.items() if child is not None and "norm" in name]
    return {"q", "k"} <= {name[0] for name in norms}


def has_add(module: Any) -> bool:
    """Whether a module seems to be a layer with a residual; what it really does its code says."""
    has_norm = any("norm" in name for name, child in module._modules.items() if child is not None)
    code = getattr(undecorated(getattr(peel(type(module)), "forward", None)), "__code__", None)
    return has_norm and code is not None and "residual" in code.co_varnames


def _install(
    model: nn.Module,
    impl: Callable[..., Any],
    concerns: Callable[[Any], bool],
    pattern: Callable[..., Found | Reason],
    fused: Callable[..., Callable[..., Any] | Reason],
) -> int:
    current = active_transaction()
    assert current is not None and current.row is not None
    row = current.row
    cache: dict[Hashable, Any] = {}
    makes: dict[Hashable, Make] = {}
    refused: dict[str, None] = {}
    count = 0
    for site in _sites(model, concerns):
        module: Any = site.module
        found = _found(site, pattern)
        norms = found if isinstance(found, Reason) else _norms(module, found, site, cache)
        if isinstance(norms, Reason):
            refused[f"{site.owner.__qualname__}: {norms}"] = None
            continue
        assert isinstance(found, Found)
        # Modules that compute the same share a forward, and so a class: a compiler looks at both.
        key = site.original, *norms
        if key not in makes:
            call = fused(impl, site, found, norms, row.counts, cache)
            if isinstance(call, Reason):
                refused[f"{site.owner.__qualname__}: {call}"] = None
                continue
            makes[key] = _make(found, call)
        patch_method(module, "forward", makes[key])
        count += 1
    if refused and not count:
        raise Refused("; ".join(refused))
    row.notes += refused
    return count


def _sites(model: nn.Module, concerns: Callable[[Any], bool]) -> Iterator[Site]:
    index = ModelIndex.of(model, None)
    for cls, instances in index.by_class.items():
        for name, module in instances:
            if concerns(module):
                yield index.site(name, module, cls, "forward")


def _found(site: Site, pattern: Callable[..., Found | Reason]) -> Found | Reason:
    blocked = obstacle(site)
    if blocked is not None:
        return blocked
    tree = body_of(site.original)
    return tree if isinstance(tree, Reason) else pattern(tree)


def _norms(module: Any, found: Found, site: Site, cache: dict[Hashable, Any]) -> tuple[Norm, ...] | Reason:
    norms = []
    for name in found.norms:
        norm = norm_of(getattr(module, name, None), name, site, cache)
        if isinstance(norm, Reason):
            return norm
        norms.append(norm)
    if any(norm.kind != norms[0].kind for norm in norms):
        return Reason("other-norm", "its norms of queries and keys are of two kinds")
    return tuple(norms)


def _make(found: Found, fused: Callable[..., Any]) -> Make:
    def make(original: Any) -> Callable[..., Any]:
        tree = body_of(original)
        assert not isinstance(tree, Reason)
        return as_original(rewritten(original, tree, found.body, **{FUSED: fused}), original)

    return make


# --- what takes the statements' place ---------------------------------------------------------------------------------


def _fused_add(
    impl: Callable[..., Any], site: Site, found: Found, norms: tuple[Norm], counts: Counts, cache: dict[Hashable, Any]
) -> Callable[..., Any] | Reason:
    """A function ``(norm, residual, summand)`` that gives the sum and its norm."""
    (norm,) = norms
    kind, accepts = norm.kind, getattr(impl, "accepts_call", None)
    weight, eps = norm.variant.weight, norm.variant.eps

    def as_it_was(module: Any, residual: torch.Tensor, summand: torch.Tensor) -> Any:
        total = residual + summand
        return total, module(total)

    def kernel(module: Any, residual: torch.Tensor, summand: torch.Tensor) -> Any:
        return impl(residual, summand, weight_of(module, weight), eps=getattr(module, eps), **kind)

    def accepts_call(module: Any, residual: torch.Tensor, summand: torch.Tensor) -> str | None:
        why = norm.why_call(module) or hooks_for_all()
        if why is not None or accepts is None:
            return why
        return accepts(residual, summand, weight_of(module, weight), eps=getattr(module, eps), **kind)  # type: ignore[no-any-return]

    place = f"{site.owner.__qualname__}.forward's sum and {found.norms[0]}"
    return counted(kernel, as_it_was, counts, accepts_call=accepts_call, place=place)


def _fused_qk(
    impl: Callable[..., Any],
    site: Site,
    found: Found,
    norms: tuple[Norm, Norm],
    counts: Counts,
    cache: dict[Hashable, Any],
) -> Callable[..., Any] | Reason:
    """A function ``(q_norm, k_norm, rotary, q, k, cos, sin)`` that gives queries and keys, normalised and rotated."""
    known = _rotary(site, found, cache)
    if isinstance(known, Reason):
        return known
    q_norm, k_norm = norms
    kind, accepts = {**q_norm.kind, "heads_at": found.heads_at}, getattr(impl, "accepts_call", None)
    (q_weight, q_eps), (k_weight, k_eps) = ((norm.variant.weight, norm.variant.eps) for norm in norms)

    def as_it_was(q_module: Any, k_module: Any, rotary: Any, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        q, k = q_module(q), k_module(k)
        if found.heads_at == 2:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        return rotary(q, k, cos, sin)

    def kernel(q_module: Any, k_module: Any, rotary: Any, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        weights = weight_of(q_module, q_weight), weight_of(k_module, k_weight)
        return impl(q, k, *weights, cos, sin, q_eps=getattr(q_module, q_eps), k_eps=getattr(k_module, k_eps), **kind)

    def accepts_call(q_module: Any, k_module: Any, rotary: Any, q: Any, k: Any, cos: Any, sin: Any) -> str | None:
        why = q_norm.why_call(q_module) or k_norm.why_call(k_module) or hooks_for_all()
        if why is None and rotary is not known:
            router = router_of(rotary)  # the op ``rotary`` may have put one in its place
            if router is None or router.original is not known or router.served_by[0] != "rotary":
                why = "the rotary function is not the one that was there when the kernel was installed"
        if why is not None or accepts is None:
            return why
        weights = weight_of(q_module, q_weight), weight_of(k_module, k_weight)
        return accepts(q, k, *weights, cos, sin, q_eps=getattr(q_module, q_eps), k_eps=getattr(k_module, k_eps), **kind)  # type: ignore[no-any-return]

    place = f"{site.owner.__qualname__}.forward's {' and '.join(found.norms)} and {found.rotary}"
    return counted(kernel, as_it_was, counts, accepts_call=accepts_call, place=place)


def _rotary(site: Site, found: Found, cache: dict[Hashable, Any]) -> Any:
    """The rotary function that a forward calls, as it is without kernels; a Reason where it is of another kind."""
    forward = undecorated(site.original)
    holder = sys.modules.get(forward.__module__)
    assert found.rotary is not None
    patch = None if holder is None else patch_of(holder, found.rotary)
    function = patch.original if patch else forward.__globals__.get(found.rotary)
    if function is None:
        return Reason("other-rotary", f"its Python module has no function {found.rotary}")
    variant = variant_of(
        rotary_reference, Site(None, found.rotary, holder, found.rotary, function, site.device, site.dtype), cache
    )
    if isinstance(variant, Reason):
        return Reason("other-rotary", f"its {found.rotary} is no rotary function that is known: {variant}")
    if variant.dialect != DIALECT or variant.parameters != SIGNATURES[0]:
        return Reason("other-rotary", f"its {found.rotary} isn't the half-split one of queries and keys")
    return function

"""Liger's kernels behind our backends: the numbers, and that nothing of the caller's is written to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.liger_sites import CASES, load, site_of
from twinkle.kernel.ops import liger_support
from twinkle.kernel.probe import WIDTH, agree, cast, random_tensor, stand_in
from twinkle.kernel.registry import get_op
from twinkle.kernel.small_runs import rounded, run_call
from twinkle.kernel.targets import Site
from twinkle.kernel.verify import allowed_error_used

pytestmark = pytest.mark.liger

DTYPES = (torch.float32, torch.bfloat16)
BY_OP = [pytest.param(*case, id=name) for name, case in CASES.items()]
CHEAP = [pytest.param(*case, id=name) for name, case in CASES.items() if name in ("norm, 1 + w", "geglu", "experts")]


@pytest.mark.parametrize("dtype", DTYPES, ids=("fp32", "bf16"))
@pytest.mark.parametrize(("op", "family", "name"), BY_OP)
def test_forward_and_backward_are_within_the_judgement(op: str, family: str, name: str, dtype: torch.dtype) -> None:
    site = site_of(op, family, name)
    reference = get_op(op).load_reference()
    loaded, exact = load(op, site), reference.build(site.variant, torch.float64)
    kernel = getattr(loaded, "forward", loaded)
    example = rounded(reference.example(site, site.variant), dtype)
    cpu = torch.device("cpu")
    ours, theirs = (run_call(f, example, dtype, cpu) for f in (kernel, site.original))
    judge = run_call(getattr(exact, "forward", exact), example, torch.float64, cpu)
    assert ours.keys() == theirs.keys()
    assert sum(result.startswith("gradient") for result in ours) >= 1
    used = {result: allowed_error_used(ours[result], theirs[result], judge[result]) for result in ours}
    assert max(used.values()) <= 1, used
    inputs = [a.to(dtype) if torch.is_tensor(a) and a.is_floating_point() else a for a in example.args]
    module = [] if example.module is None else [example.module.to(dtype)]
    assert loaded.accepts_call(*module, *inputs) is None, "the model would not have called the kernel"


@pytest.mark.parametrize(("op", "family", "name"), BY_OP[:4])
def test_norms_round_where_the_original_rounds(op: str, family: str, name: str) -> None:
    """The judgement lets one rounding more pass; in bf16 another order of casts moves a quarter of the elements."""
    site = site_of(op, family, name)
    kernel = load(op, site).forward
    module, x = cast(stand_in(site.module), torch.bfloat16), random_tensor(64, WIDTH, seed=7, dtype=torch.bfloat16)
    assert agree(kernel(module, x), site.original(module, x), mismatches=0.02)


def test_the_cases_are_the_variants_that_they_say() -> None:
    norms = [site_of(*CASES[name]).variant for name in list(CASES)[:5]]
    assert [(n.offset, n.cast, n.weight) for n in norms] == [
        (0.0, "before", "weight"),
        (0.0, "after", "weight"),
        (1.0, "after", "weight"),
        (0.0, "after", None),
        (0.0, "factor", None),
    ]
    assert [site_of(*CASES[name]).variant.dialect.restores for name in ("rotary", "rotary, restoring")] == [False, True]


# --- what callers may rely on: nothing of theirs is written to, and a graph can be used again ------------------------


class _Held:
    """Every tensor that a caller could still hold, with a copy of what it was."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def hold(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.pairs.append((name, tensor, tensor.detach().clone()))
        return tensor

    def output_of(self, name: str) -> Any:
        """A forward hook that holds what a module returned."""
        return lambda module, args, output: self.hold(f"output of {name}", output)

    def overwritten(self) -> list[str]:
        return [name for name, tensor, was in self.pairs if not torch.equal(tensor, was)]


def _call(op: str, site: Site, held: _Held) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
    """One call of the kernel on tensors laid out as models lay them out: its results, and what to differentiate by."""
    loaded = load(op, site)
    if site.module is None:
        example = get_op(op).load_reference().example(site, site.variant)
        # Views of the projections' outputs [B, S, H, D]: the layout in which Liger's kernel works in place.
        q, k = (a.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for a in example.args[:2])
        cos, sin = example.args[2:]
        for tensor_name, tensor in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
            held.hold(tensor_name, tensor)
        return loaded(q, k, cos, sin), [q, k]
    example = get_op(op).load_reference().example(site, site.variant)
    module, x = example.module, example.args[0].requires_grad_()
    held.hold("x", x)
    for name, parameter in module.named_parameters():
        held.hold(name, parameter.requires_grad_())
    for name, child in module.named_children():
        child.register_forward_hook(held.output_of(name))
    return (loaded.forward(module, x, *example.args[1:]),), [x, *module.parameters()]


@pytest.mark.parametrize(("op", "family", "name"), BY_OP)
def test_nothing_of_the_callers_is_overwritten_and_a_second_backward_is_right(op: str, family: str, name: str) -> None:
    held = _Held()
    results, inputs = _call(op, site_of(op, family, name), held)
    # In the layout of the results, which for rotary is the one that Liger's backward works in place on.
    seeds = [held.hold(f"gradient {i}", torch.randn_like(r)) for i, r in enumerate(results)]
    for i, result in enumerate(results):
        held.hold(f"result {i}", result)
    first = [g.clone() for g in torch.autograd.grad(results, inputs, seeds, retain_graph=True)]
    assert held.overwritten() == []
    second = torch.autograd.grad(results, inputs, seeds)
    assert held.overwritten() == []
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(("op", "family", "name"), CHEAP + [BY_OP[8]])
def test_a_second_derivative_raises_instead_of_missing_a_part(op: str, family: str, name: str) -> None:
    results, inputs = _call(op, site_of(op, family, name), _Held())
    (gradient, *_) = torch.autograd.grad([r.square().sum() for r in results], inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_what_wrote_over_the_activations_is_what_we_think() -> None:
    """Liger's own Function does overwrite its inputs: without that, the copies in our backward would be for nothing."""
    ops = pytest.importorskip("liger_kernel.ops")
    gate, up = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    was = gate.detach().clone()
    ops.LigerSiLUMulFunction.apply(gate, up).sum().backward()
    assert not torch.equal(gate, was)


@pytest.mark.parametrize(("op", "family", "name"), CHEAP + [BY_OP[8]])
def test_a_kernel_is_launched_with_its_operands_device_current(
    op: str, family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[str] = []

    @contextlib.contextmanager
    def on_device(tensor: torch.Tensor) -> Iterator[None]:
        current.append(str(tensor.device))
        yield
        current.append("left")

    site = site_of(op, family, name)
    load(op, site)
    monkeypatch.setattr(liger_support, "on_device", on_device)
    _call(op, site, _Held())
    assert current == ["cpu", "left"]

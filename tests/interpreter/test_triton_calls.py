"""What installed Triton kernels do call by call: outside their domain the original runs, counted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.liger_sites import PATH, make
from tests.support.triton_device import DEVICE, NO_GPU, ON_GPU, negated
from twinkle import presets
from twinkle.kernel import KernelChoice, journal, kernelize
from twinkle.kernel.ops import worthwhile
from twinkle.kernel.report import Row, report
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import allowed_error_used


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    assert [patch.where for patch in journal._patches.values()] == []


LAYERS: dict[str, tuple[str, str, str]] = {
    "norm": ("rms_norm", "llama", "LlamaRMSNorm"),
    "norm, 1 + w": ("rms_norm", "gemma", "GemmaRMSNorm"),
    "norm without weight": ("rms_norm", "gemma4", "Gemma4RMSNorm"),
    "gated norm": ("gated_rms_norm", "qwen3_next", "Qwen3NextRMSNormGated"),
    "swiglu": ("swiglu", "qwen3", "Qwen3MLP"),
    "swiglu, fused projection": ("swiglu", "phi3", "Phi3MLP"),
    "geglu": ("geglu", "gemma", "GemmaMLP"),
}


def pair(name: str) -> tuple[nn.Module, nn.Module, Row]:
    """A layer, the same with our kernel installed, and the row that counts its calls."""
    op, family, cls = LAYERS[name]
    original = make(family, cls).to(DEVICE)
    module = copy.deepcopy(original)
    method = "" if op == "rms_norm" else ".forward"
    kernelize(module, {PATH.format(family, cls) + method: KernelChoice(op, ("triton",))}, device=DEVICE, strict=True)
    (row,) = report(module).rows
    return original, module, row


def arguments(name: str, make_x: Callable[..., torch.Tensor] = torch.randn, shape: tuple[int, ...] = (3, 32)) -> Any:
    count = 2 if name == "gated norm" else 1
    torch.manual_seed(0)
    with torch.device(DEVICE):  # a copy to another would no longer be negated
        return [make_x(shape) for _ in range(count)]


class _Subclass(torch.Tensor):
    pass


INPUTS: dict[str, tuple[Callable[[Any], torch.Tensor], str]] = {
    "fp64": (lambda shape: torch.randn(shape, dtype=torch.float64), "fp32, bf16, fp16"),
    "no rows": (lambda shape: torch.randn(0, *shape[1:]), "an empty tensor"),
    "a subclass": (lambda shape: torch.randn(shape).as_subclass(_Subclass), "a tensor subclass"),
    "negated": (lambda shape: negated(torch.randn(shape)), "a negated tensor"),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", INPUTS)
def test_an_input_outside_the_domain_runs_the_original(name: str, kind: str) -> None:
    make_x, reason = INPUTS[kind]
    original, module, row = pair(name)
    if kind == "fp64":
        original, module = original.double(), module.double()
    inputs = arguments(name, make_x)
    result, expected = module(*inputs), original(*inputs)
    assert type(result) is type(expected) and result.dtype == expected.dtype
    assert torch.equal(result, expected)
    assert row.calls == 0 and [reason in text for text in row.fallbacks] == [True]
    unkernelize(module)


@pytest.mark.parametrize("name", LAYERS)
def test_an_ordinary_call_runs_the_kernel(name: str) -> None:
    original, module, row = pair(name)
    inputs = arguments(name)
    exact = copy.deepcopy(original).double()(*(t.double() for t in inputs))
    assert allowed_error_used(module(*inputs), original(*inputs), exact) <= 1
    assert (row.calls, row.fallbacks) == (1, {})


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_on_another_device_runs_the_original(name: str) -> None:
    _, module, row = pair(name)
    inputs = [t.to("meta") for t in arguments(name)]
    assert module.to("meta")(*inputs).is_meta
    assert (row.calls, list(row.fallbacks)) == (0, ["the tensor is on a device that Triton doesn't run on"])


@pytest.mark.parametrize("name", LAYERS)
def test_transforms_of_torch_func_run_the_original(name: str) -> None:
    original, module, row = pair(name)
    inputs = arguments(name)
    torch.testing.assert_close(torch.func.vmap(module)(*inputs), torch.func.vmap(original)(*inputs))
    gradient, expected = (torch.func.grad(lambda *a, f=f: f(*a).square().sum())(*inputs) for f in (module, original))
    torch.testing.assert_close(gradient, expected)
    assert (row.calls, len(row.fallbacks)) == (0, 1) and "functorch" in next(iter(row.fallbacks))


@pytest.mark.parametrize("name", LAYERS)
def test_what_a_transform_has_left_behind_runs_the_original(name: str) -> None:
    """It has no memory of its own, although it looks like a plain tensor."""
    original, module, row = pair(name)
    kept: list[torch.Tensor] = []
    x, *rest = arguments(name)
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(x)
    assert torch.equal(module(kept[0], *rest), original(kept[0], *rest))
    assert row.calls == 0 and ["functorch" in text for text in row.fallbacks] == [True]


@pytest.mark.parametrize("name", LAYERS)
def test_forward_mode_differentiation_runs_the_original(name: str) -> None:
    import torch.autograd.forward_ad as forward_ad

    original, module, row = pair(name)
    inputs = arguments(name)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, torch.ones_like(t)) for t in inputs]
        ours, theirs = (forward_ad.unpack_dual(layer(*duals)).tangent for layer in (module, original))
    assert torch.equal(ours, theirs)
    assert (row.calls, len(row.fallbacks)) == (0, 1)


@pytest.mark.parametrize("name", LAYERS)
def test_what_make_fx_traces_is_the_original(name: str) -> None:
    """A trace would hold the empty results, and nothing that fills them."""
    original, module, row = pair(name)
    inputs = arguments(name)
    traced = make_fx(module)(*inputs)
    others = [2 * t for t in inputs]
    torch.testing.assert_close(traced(*others), original(*others))
    assert (row.calls, list(row.fallbacks)) == (0, ["inside make_fx"])


# --- norms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", (torch.randn(64)[::2], torch.randn(1)), ids=("strided", "one number"))
def test_a_weight_that_the_kernel_can_not_read(weight: torch.Tensor) -> None:
    original, module, row = pair("norm")
    for layer in (original, module):
        layer.weight = nn.Parameter(torch.empty_strided(weight.shape, weight.stride(), device=DEVICE).copy_(weight))
    assert original.weight.stride() == weight.stride()  # type: ignore[union-attr]
    inputs = arguments("norm")
    assert torch.equal(module(*inputs), original(*inputs))
    assert (row.calls, list(row.fallbacks)) == (0, ["the weight is strided, or not as long as the rows"])


def test_a_weight_of_another_length_is_the_originals_error() -> None:
    original, module, row = pair("norm")
    (x,) = arguments("norm", shape=(3, 31))
    for layer in (original, module):
        with pytest.raises(RuntimeError, match="must match the size"):
            layer(x)
    assert row.calls == 0 and row.counts.errors == 0


def test_a_weight_that_is_no_parameter() -> None:
    """As tools that flatten all parameters into one leave it: an attribute, a view of the flat one."""
    original, module, row = pair("norm")
    for layer in (original, module):
        weight = layer.weight.detach()
        del layer.weight
        layer.weight = weight
    inputs = arguments("norm")
    torch.testing.assert_close(module(*inputs), original(*inputs))
    assert row.calls == 1


def test_rows_along_more_dimensions_than_the_kernel_follows() -> None:
    original, module, row = pair("norm")
    x = torch.randn(4, 4, 4, 4, 32, device=DEVICE)[::2, ::2, ::2, ::2]
    assert torch.equal(module(x), original(x))
    assert row.calls == 0 and "more than three dimensions" in next(iter(row.fallbacks))


@pytest.mark.parametrize("name", ("norm", "gated norm"))
@pytest.mark.parametrize(("x_dtype", "dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_weight_of_another_dtype(name: str, x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """The result has the original's dtype, promoted or not."""
    original, module, row = pair(name)
    original, module = original.to(dtype), module.to(dtype)
    inputs = [t.to(x_dtype) for t in arguments(name)]
    result, expected = module(*inputs), original(*inputs)
    exact = copy.deepcopy(original).double()(*(t.double() for t in inputs))
    assert allowed_error_used(result, expected, exact) <= 1
    assert row.calls == 1


def test_a_gate_of_another_shape_is_broadcast_by_the_original() -> None:
    original, module, row = pair("gated norm")
    x, gate = arguments("gated norm")
    for other in (gate[:1], gate[0]):
        assert torch.equal(module(x, other), original(x, other))
    assert row.calls == 0 and "a gate of another shape" in next(iter(row.fallbacks))


def test_a_gated_norm_of_wide_rows_runs_the_original() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    wide, inputs = Qwen3NextRMSNormGated(16385).to(DEVICE), [torch.randn(1, 16385, device=DEVICE) for _ in range(2)]
    expected = wide(*inputs)
    target = PATH.format("qwen3_next", "Qwen3NextRMSNormGated.forward")
    kernelize(wide, {target: KernelChoice("gated_rms_norm", ("triton",))})
    assert torch.equal(wide(*inputs), expected)
    assert list(report(wide).rows[0].fallbacks) == ["rows too wide for the gated kernel"]


# --- gated MLPs -------------------------------------------------------------------------------------------------------


def test_projections_of_different_dtypes_are_multiplied_as_the_original_does() -> None:
    original, module, row = pair("swiglu")
    for layer in (original, module):
        layer.up_proj.register_forward_hook(lambda m, args, out: out.double())  # type: ignore[union-attr]
        layer.down_proj.double()  # type: ignore[union-attr]
    inputs = arguments("swiglu")
    assert torch.equal(module(*inputs), original(*inputs))


def test_a_fused_projection_with_an_odd_width_is_the_originals_business() -> None:
    """With three columns the original multiplies two by one; nothing may be read beyond them."""
    original, module, _ = pair("swiglu, fused projection")
    for layer in (original, module):
        layer.gate_up_proj = nn.Linear(32, 3, bias=False, device=DEVICE)
        layer.gate_up_proj.weight.data.fill_(0.1)
        layer.down_proj = nn.Linear(2, 32, bias=False, device=DEVICE)
        layer.down_proj.weight.data.fill_(0.1)
    inputs = arguments("swiglu, fused projection")
    assert torch.equal(module(*inputs), original(*inputs))


@pytest.mark.parametrize("name", ("norm", "swiglu", "swiglu, fused projection"))
def test_under_autocast_the_numbers_are_the_originals(name: str) -> None:
    original, module, row = pair(name)
    inputs = arguments(name)
    exact = copy.deepcopy(original).double()(*(t.double() for t in inputs))
    with torch.autocast(DEVICE, torch.bfloat16):
        result, expected = module(*inputs), original(*inputs)
    assert allowed_error_used(result, expected, exact) <= 1
    assert row.calls == 1


def test_an_mlps_input_may_lie_as_it_likes() -> None:
    """The projections read it, not the kernel."""
    original, module, row = pair("swiglu")
    x = torch.randn(4, 4, 4, 4, 32, device=DEVICE)[::2, ::2, ::2, ::2]
    torch.testing.assert_close(module(x), original(x))
    assert (row.calls, row.fallbacks) == (1, {})


# --- rotary -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def rotary() -> Iterator[tuple[Any, Any, Row]]:
    """Qwen3's function, the same with our kernel in its place, and the row that counts the calls."""
    from transformers.models.qwen3 import modeling_qwen3 as module

    original = module.apply_rotary_pos_emb
    model = presets.build("qwen3", device=DEVICE, num_hidden_layers=1)
    target = PATH.format("qwen3", "apply_rotary_pos_emb")
    kernelize(model, {target: KernelChoice("rotary", ("triton",))}, strict=True)
    yield original, module.apply_rotary_pos_emb, report(model).rows[0]
    unkernelize(model)


def rotary_arguments(change: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 4, 3, 16), (2, 2, 3, 16), (2, 3, 16), (2, 3, 16)]
    return [change(torch.randn(shape, device=DEVICE)) for shape in shapes]


ROTARY: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "fp64": (torch.Tensor.double, "fp32, bf16, fp16"),
    "no tokens": (lambda t: t[..., :0, :], "an empty tensor"),
    "a subclass": (lambda t: t.as_subclass(_Subclass), "a tensor subclass"),
    "another device": (lambda t: t.to("meta"), "a device that Triton doesn't run on"),
    "negated": (negated, "a negated tensor"),
    "learnt tables": (torch.Tensor.requires_grad_, "needs a gradient"),
}


@pytest.mark.parametrize(("change", "reason"), ROTARY.values(), ids=ROTARY)
def test_a_rotation_outside_the_domain_runs_the_original(rotary: Any, change: Any, reason: str) -> None:
    original, function, row = rotary
    inputs = rotary_arguments(change)
    for result, expected in zip(function(*inputs), original(*inputs), strict=True):
        assert type(result) is type(expected)
        assert result.is_meta or torch.equal(result, expected)
    assert row.calls == 0 and [reason in text for text in row.fallbacks] == [True]


def test_a_rotation_under_vmap_runs_the_original(rotary: Any) -> None:
    original, function, row = rotary
    inputs = [t.unsqueeze(0) for t in rotary_arguments()]
    torch.testing.assert_close(torch.func.vmap(function)(*inputs), torch.func.vmap(original)(*inputs))
    assert row.calls == 0 and "functorch" in next(iter(row.fallbacks))


def test_an_ordinary_rotation_runs_the_kernel(rotary: Any) -> None:
    original, function, row = rotary
    inputs = rotary_arguments()
    torch.testing.assert_close(function(*inputs), original(*inputs))
    torch.testing.assert_close(function(*inputs[:2], cos=inputs[2], sin=inputs[3], unsqueeze_dim=1), original(*inputs))
    assert (row.calls, row.fallbacks) == (2, {})


@pytest.mark.skipif(not ON_GPU, reason=NO_GPU)
@pytest.mark.parametrize("name", ("swiglu", "swiglu, fused projection", "geglu"))
def test_a_small_product_with_gradients_is_the_originals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There it is faster. Without gradients, or compiled, or larger, the kernel runs."""
    monkeypatch.setattr(worthwhile, "_every_size", False)
    rules = {(op, "triton"): {"cuda": worthwhile.Least(3 * 32, in_training=True)} for op in ("swiglu", "geglu")}
    monkeypatch.setattr(worthwhile, "LEAST", rules)
    _, module, row = pair(name)
    below, enough = torch.randn(2, 32, device=DEVICE), torch.randn(3, 32, device=DEVICE)
    module(below)
    assert (row.calls, sum(row.fallbacks.values())) == (0, 1)
    assert any("fewer than 96 elements" in reason for reason in row.fallbacks)
    module(enough)
    with torch.no_grad():
        module(below)
    assert (row.calls, sum(row.fallbacks.values())) == (2, 1)

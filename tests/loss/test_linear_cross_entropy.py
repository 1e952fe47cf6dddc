"""The loss of a linear layer's outputs is cross-entropy, to the last option, and never holds all outputs."""

from __future__ import annotations

import importlib
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from twinkle.kernel.verify import allowed_error_used
from twinkle.loss import linear_cross_entropy
from twinkle.loss.chunks import chunks_of
from twinkle.loss.scaling import scaled_in_place

TOKENS, HIDDEN, CLASSES = 13, 8, 37


def inputs(dtype: torch.dtype, bias: bool = False, seed: int = 0, tokens: int = TOKENS) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(shape, generator=generator).to(dtype).requires_grad_()  # noqa: E731
    target = torch.randint(CLASSES, (tokens,), generator=generator)
    target[::5] = -100
    made = {"x": random(tokens, HIDDEN), "weight": random(CLASSES, HIDDEN), "target": target}
    return made | ({"bias": random(CLASSES)} if bias else {})


def written_out(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
    accumulate: str = "",
    chunk: int = 0,
    wide: torch.dtype | None = None,
    **options: Any,
) -> torch.Tensor:
    """With all logits, by PyTorch's own function. Transformers takes them from the layer's dtype to fp32."""
    z = F.linear(x, weight, bias).to(wide or torch.promote_types(x.dtype, torch.float32)) * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    class_weight = None if class_weight is None else class_weight.to(z.dtype)
    loss = F.cross_entropy(z, target, weight=class_weight, **options)
    if not z_loss:
        return loss
    counts = target != options.get("ignore_index", -100)
    squares = (torch.logsumexp(z, -1).square() * z_loss).where(counts, 0)
    if options.get("reduction", "mean") == "none":
        return loss + squares
    if options.get("reduction", "mean") == "sum":
        return loss + squares.sum()
    share = counts if class_weight is None else class_weight[target.where(counts, 0)] * counts
    return loss + squares.sum() / share.sum()


def step(function: Any, made: dict[str, Any], options: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The loss and every gradient, for an incoming gradient that is not one."""
    leaves = {
        name: t.detach().to(dtype).requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for name, t in made.items()
    }
    loss = function(**leaves, **options)
    upstream = torch.linspace(0.3, 1.7, loss.numel()).view(loss.shape).to(loss.dtype)
    wanted = {name: t for name, t in leaves.items() if t.requires_grad}
    gradients = torch.autograd.grad(loss, list(wanted.values()), upstream)
    return {"loss": loss.detach(), **dict(zip(wanted, gradients, strict=True))}


options = st.fixed_dictionaries(
    {
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
        "z_loss": st.sampled_from([0.0, 1e-3]),
        "scale": st.sampled_from([1.0, 0.25, 3.0]),
        "softcap": st.sampled_from([None, 2.0, 30.0]),
        "ignore_index": st.sampled_from([-100, 3]),
        "class_weight": st.sampled_from([None, "random"]),
    }
)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    options=options,
    bias=st.booleans(),
    chunk=st.sampled_from([1, 4, 13, 100]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 10),
)
def test_it_is_cross_entropy(options: dict[str, Any], bias: bool, chunk: int, dtype: torch.dtype, seed: int) -> None:
    """Loss and gradients within the numerical judgement, over all options, chunks and dtypes."""
    made = inputs(dtype, bias, seed)
    if options["ignore_index"] != -100:
        made["target"].clamp_(min=0)
    if options["class_weight"] is not None:
        options["class_weight"] = torch.rand(CLASSES, generator=torch.Generator().manual_seed(seed)) + 0.1
    ours = step(linear_cross_entropy, made, {**options, "chunk": chunk}, dtype)
    theirs = step(written_out, made, options, dtype)
    exact = step(written_out, made, options, torch.float64)
    used = {name: allowed_error_used(ours[name], theirs[name], exact[name]) for name in theirs}
    assert all(share <= 1 for share in used.values()), used


def test_fp64_is_fp64_throughout() -> None:
    made = inputs(torch.float64, bias=True)
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "class_weight": torch.rand(CLASSES)}
    for reduction in ("mean", "none"):
        results = (
            step(function, made, {**options, "reduction": reduction}, torch.float64)
            for function in (linear_cross_entropy, written_out)
        )
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


def test_gradcheck() -> None:
    made = inputs(torch.float64, bias=True, tokens=5)
    for reduction in ("mean", "sum", "none"):
        call = lambda x, w, b, r=reduction: linear_cross_entropy(  # noqa: E731
            x, w, made["target"], bias=b, reduction=r, chunk=2, softcap=3.0, label_smoothing=0.2
        )
        assert torch.autograd.gradcheck(call, (made["x"], made["weight"], made["bias"]))


def test_batches_keep_their_shape() -> None:
    made = inputs(torch.float32, tokens=12)
    x, target = made["x"].view(3, 4, HIDDEN), made["target"].view(3, 4)
    losses = linear_cross_entropy(x, made["weight"], target, reduction="none")
    assert losses.shape == (3, 4) and losses.dtype == torch.float32
    torch.testing.assert_close(losses.flatten(), written_out(**made, reduction="none"))


# --- what isn't held, what isn't computed -----------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most elements that any tensor made within it has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_no_more_logits_are_there_than_those_of_a_chunk(reduction: str) -> None:
    made = inputs(torch.float32, tokens=200)
    for chunk, most in ((10, 10 * CLASSES), (200, 200 * CLASSES)):
        with Largest() as largest:
            linear_cross_entropy(**made, reduction=reduction, chunk=chunk).sum().backward()
        assert largest.elements == max(most, 200 * HIDDEN)


class Logits(TorchDispatchMode):
    """How many tensors of logits there are when further ones are computed, at most; see :class:`Largest`."""

    most = 0

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and result.shape[1] == CLASSES:
            self.seen.append(weakref.ref(result))
            self.most = max(self.most, sum(logits() is not None for logits in self.seen))
        return result


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_logits_of_the_chunk_before_are_gone(reduction: str) -> None:
    made = inputs(torch.float32)
    with Logits() as logits:
        linear_cross_entropy(**made, reduction=reduction, chunk=4).sum().backward()
    assert len(logits.seen) >= 4 and logits.most == 1


@pytest.mark.parametrize("accumulate", ["fp32", "weight"])
def test_the_weights_gradient_is_there_once(accumulate: str) -> None:
    """Neither in two dtypes, nor with and without the divisor of the mean."""
    made = inputs(torch.bfloat16)
    made["weight"] = torch.randn(512, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(**made, accumulate=accumulate, chunk=4).backward()
    gradient = made["weight"].grad
    assert gradient.untyped_storage().nbytes() == gradient.numel() * (4 if accumulate == "fp32" else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0, 3), (1,), (3, 5), (1025, 1024), (3, 2**20 - 1)])
def test_scaling_in_place_loses_nothing(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = (gradient * 0.3).to(dtype)
    memory = gradient.untyped_storage().data_ptr()
    found = scaled_in_place(gradient, torch.tensor(0.3), dtype, "torch")
    assert found.dtype == dtype and found.shape == expected.shape and found.is_contiguous()
    assert torch.equal(found, expected) and found.untyped_storage().data_ptr() == memory


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_retained_graph_gives_the_same_gradients_again(reduction: str) -> None:
    made = inputs(torch.bfloat16, bias=True)
    wanted = [made["x"], made["weight"], made["bias"]]
    loss = linear_cross_entropy(**made, reduction=reduction, chunk=4).sum()
    first = [g.clone() for g in torch.autograd.grad(loss, wanted, retain_graph=True)]
    for factor in (1.0, 2.0):
        again = torch.autograd.grad(factor * loss, wanted, retain_graph=True)
        for one, other in zip(first, again, strict=True):
            torch.testing.assert_close(factor * one, other, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize(("tokens", "most"), [(0, 7), (1, 7), (300, 100), (1000, 1316), (8192, 1766), (5000, 1316)])
def test_chunks_cover_all_tokens_and_none_is_too_long(tokens: int, most: int) -> None:
    chunks = list(chunks_of(tokens, most))
    assert [token for part in chunks for token in range(tokens)[part]] == list(range(tokens))
    assert all(len(range(tokens)[part]) <= most for part in chunks)


@pytest.mark.parametrize(
    ("tokens", "most", "lengths"),
    [
        (7680, 1316, [1280] * 6),
        (8192, 1579, [1280, 1280, 1536, 1280, 1280, 1536]),
        (5000, 1316, [1280, 1280, 1280, 1160]),
        (300, 100, [100, 100, 100]),
    ],
)
def test_chunks_are_few_and_equal_and_whole_tiles(tokens: int, most: int, lengths: list[int]) -> None:
    assert [part.stop - part.start for part in chunks_of(tokens, most)] == lengths


def test_chunks_are_smaller_where_the_formula_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("twinkle.loss.linear_cross_entropy")
    monkeypatch.setattr(module, "CHUNK_ELEMENTS_WRITTEN_OUT", 10 * CLASSES)
    with Largest() as largest:
        linear_cross_entropy(**inputs(torch.float32, tokens=200)).backward()
    assert largest.elements == 200 * HIDDEN > 10 * CLASSES


def test_a_frozen_head_costs_no_gradient_of_its_own() -> None:
    made = inputs(torch.float32, bias=True)
    for frozen in (("weight", "bias"), ("x",)):
        some = {name: t.detach() if name in frozen else t for name, t in made.items()}
        for reduction in ("mean", "none"):
            ours = step(linear_cross_entropy, some, {"reduction": reduction}, torch.float32)
            theirs = step(written_out, some, {"reduction": reduction}, torch.float32)
            assert ours.keys() == theirs.keys() and not ours.keys() & set(frozen)
            torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        assert not linear_cross_entropy(**made).requires_grad


def test_the_error_of_the_weights_gradient_does_not_grow_with_the_chunks() -> None:
    """Summed up in fp32; in the weight's dtype it does, which is why one asks for that."""
    made = inputs(torch.bfloat16, tokens=512)
    exact = step(written_out, made, {}, torch.float64)["weight"]
    error: dict[tuple[str, int], float] = {}
    for accumulate in ("fp32", "weight"):
        for chunk in (512, 4):
            options = {"accumulate": accumulate, "chunk": chunk}
            ours = step(linear_cross_entropy, made, options, torch.bfloat16)["weight"]
            assert ours.dtype == torch.bfloat16
            error[accumulate, chunk] = float((ours.double() - exact).norm() / exact.norm())
    assert error["fp32", 4] < 1.05 * error["fp32", 512]
    assert error["weight", 4] > 2 * error["fp32", 4]


def gradients_of(function: Any, made: dict[str, Any], dtype: torch.dtype, factor: float) -> list[torch.Tensor]:
    """Of ``factor`` times the loss, divided by it."""
    leaves = {n: t.detach().to(dtype).requires_grad_() if t.is_floating_point() else t for n, t in made.items()}
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    return [g.double() / factor for g in torch.autograd.grad(factor * function(**leaves), wanted)]


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float16, 65536.0), (torch.bfloat16, 1 / 3)])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_comes_after_the_loss_costs_no_precision(dtype: torch.dtype, factor: float, compiled: bool) -> None:
    """A gradient scaler's factor is more than fp16 holds, and shares of many tokens less; bf16 has three digits."""
    torch._dynamo.reset()
    made = inputs(dtype, bias=True, tokens=2**16)
    ours = torch.compile(linear_cross_entropy, backend="aot_eager") if compiled else linear_cross_entropy
    found, theirs = (gradients_of(function, made, dtype, factor) for function in (ours, written_out))
    exact = gradients_of(written_out, made, torch.float64, 1.0)
    for gradient, original, right in zip(found, theirs, exact, strict=True):
        assert (gradient - right).norm() < 1.1 * (original - right).norm() + 1e-4 * right.norm()
    torch._dynamo.reset()


# --- edges ------------------------------------------------------------------------------------------------------------


def test_when_no_token_counts() -> None:
    made = inputs(torch.float32)
    made["target"].fill_(-100)
    assert linear_cross_entropy(**made).isnan() and F.cross_entropy(torch.zeros(2, 3), torch.tensor([-100] * 2)).isnan()
    for reduction in ("sum", "mean"):  # the gradient of PyTorch's mean, which is NaN, is zero too
        loss = linear_cross_entropy(**made, reduction=reduction)
        gradients = torch.autograd.grad(loss, (made["x"], made["weight"]))
        assert not any(gradient.any() for gradient in gradients) and (loss == 0 or reduction == "mean")


def test_without_tokens() -> None:
    made = inputs(torch.float32, tokens=0)
    linear_cross_entropy(**made, reduction="sum").backward()
    assert made["x"].grad.shape == (0, HIDDEN) and not made["weight"].grad.any()
    assert linear_cross_entropy(**made).isnan()


def test_it_follows_autocast() -> None:
    made = inputs(torch.float32, bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        results = [step(function, made, {}, torch.float32) for function in (linear_cross_entropy, written_out)]
    assert all(result["weight"].dtype == torch.float32 for result in results)
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


def test_a_gradient_of_the_gradient_is_an_error() -> None:
    made = inputs(torch.float32)
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(**made, reduction=reduction).sum()
        with pytest.raises(RuntimeError, match="can't be differentiated again"):
            torch.autograd.grad(loss, made["x"], create_graph=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_compiled(reduction: str, dynamic: bool) -> None:
    """One graph, the same numbers, and no more graphs for other lengths where those are symbols."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return aot(graph, example)

    aot = importlib.import_module("torch._dynamo.backends.debugging").aot_eager
    chosen: dict[str, Any] = {"reduction": reduction, "chunk": 4, "softcap": 5.0, "scale": 0.5, "label_smoothing": 0.1}

    def loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, weight, target, bias=bias, **chosen)

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend=backend)
    after = []
    for tokens in (13, 29):
        made = inputs(torch.float32, bias=True, tokens=tokens)
        ours, theirs = (step(function, made, {}, torch.float32) for function in (compiled, loss))
        for name, expected in theirs.items():
            torch.testing.assert_close(ours[name], expected)
        after.append(len(graphs))
    assert (after[0] == after[1]) is dynamic
    frozen = {name: tensor.detach() for name, tensor in made.items()}
    with torch.no_grad():
        assert torch.equal(compiled(**frozen), loss(**frozen))
    torch._dynamo.reset()


def test_as_an_operator_it_keeps_the_rules() -> None:
    made = inputs(torch.float32)
    for reduction in ("sum", "none"):
        options = (-100, 0.1, 0.0, 1.0, None, reduction, "fp32", 4, "torch", [True, True, False])
        operator = torch.ops.twinkle.linear_cross_entropy.default
        torch.library.opcheck(operator, (made["x"], made["weight"], None, made["target"], None, *options))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.zeros(CLASSES, 9)}, r"x is \(13, 8\) and weight \(37, 9\); wanted \[..., H\] and \[V, H\]"),
        ({"target": torch.zeros(12, dtype=torch.int64)}, r"target is \(12,\); wanted \(13,\)"),
        ({"target": torch.zeros(13, dtype=torch.int32)}, "target is torch.int32; wanted torch.int64"),
        ({"weight": torch.zeros(CLASSES, 8, dtype=torch.float16)}, "x is torch.float32 and weight torch.float16"),
        ({"bias": torch.zeros(36)}, r"bias is \(36,\); wanted \(37,\)"),
        ({"bias": torch.zeros(37, dtype=torch.float64)}, "bias is torch.float64; wanted torch.float32, as x"),
        ({"class_weight": torch.zeros(1)}, r"class_weight is \(1,\); wanted \(37,\)"),
        ({"reduction": "avg"}, "reduction is 'avg'; wanted 'none', 'mean' or 'sum'"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5; wanted 0 to 1"),
        ({"softcap": 0.0}, "softcap is 0.0; wanted a positive number or None"),
        ({"accumulate": "bf16"}, "accumulate is 'bf16'; wanted 'fp32' or 'weight'"),
        ({"chunk": 0}, "chunk is 0; wanted a positive number or None"),
        ({"backend": "cuda"}, "backend is 'cuda'; wanted 'triton', 'torch' or None"),
        ({"backend": "triton"}, "backend 'triton' can't take torch.float32 on cpu; leave it out"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"linear_cross_entropy: {message}"):
        linear_cross_entropy(**{**inputs(torch.float32), **changes})


def test_a_class_that_there_is_not() -> None:
    for wrong in (CLASSES, -1):
        made = inputs(torch.float32)
        made["target"][1] = wrong
        with pytest.raises(IndexError, match="a target is out of bounds; wanted 0 to 36"):
            linear_cross_entropy(**made)

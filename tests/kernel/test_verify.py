"""The numerical judgement, and what ``verify=True`` does with a kernel that fails it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from tests.support import toys
from tests.support.snapshots import differences, state_of, unchanged
from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.registry import KernelImpl, get_op, register_backend, register_op
from twinkle.kernel.report import report
from twinkle.kernel.testing import with_backends
from twinkle.kernel.undo import kernelized, unkernelize
from twinkle.kernel.verify import allowed_error_used, compare_models

pytestmark = pytest.mark.usefixtures("own_registry", "loopback")

QWEN3 = "transformers.models.qwen3.modeling_qwen3"
NORM, MLP, ROTARY = f"{QWEN3}.Qwen3RMSNorm", f"{QWEN3}.Qwen3MLP.forward", f"{QWEN3}.apply_rotary_pos_emb"


# --- the judgement --------------------------------------------------------------------------------------------------

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 2**31)
FEW = settings(max_examples=30, deadline=None)


def results(seed: int, dtype: torch.dtype, noise: float = 4.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A reference in fp64, and two results in ``dtype`` that are off by some roundings."""
    generator = torch.Generator().manual_seed(seed)
    size = int(torch.randint(1, 60, (), generator=generator))
    reference = torch.randn(size, generator=generator, dtype=torch.float64)
    off = [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2)]
    ulp = torch.finfo(dtype).eps
    kernel, original = ((reference * (1 + noise * ulp * o)).to(dtype) for o in off)
    return kernel, original, reference


@FEW
@given(SEEDS, DTYPES)
def test_the_original_is_within_the_judgement(seed: int, dtype: torch.dtype) -> None:
    _, original, reference = results(seed, dtype, noise=100.0)
    assert allowed_error_used(original, original, reference) <= 0.5


@FEW
@given(SEEDS, DTYPES)
def test_the_best_result_that_the_dtype_can_hold_is_within(seed: int, dtype: torch.dtype) -> None:
    _, original, reference = results(seed, dtype)
    rounded = reference.to(dtype)
    assert allowed_error_used(rounded, original, reference) <= 1
    assert allowed_error_used(rounded, rounded, reference) <= 1, "also beside an original that is as good"


@FEW
@given(SEEDS, DTYPES, st.floats(2.5, 1e4))
def test_a_result_much_worse_than_the_original_is_not(seed: int, dtype: torch.dtype, factor: float) -> None:
    _, _, reference = results(seed, dtype)
    reference = reference.to(dtype).double()
    ulp = torch.finfo(dtype).eps
    kernel = reference * (1 + factor * ulp)
    used = allowed_error_used(kernel.to(dtype), reference.to(dtype), reference)
    assert used > 1, "off by more than an ulp beside an original that is exact"


@FEW
@given(SEEDS, DTYPES, st.integers(-6, 6))
def test_scale_and_order_do_not_matter(seed: int, dtype: torch.dtype, exponent: int) -> None:
    kernel, original, reference = results(seed, dtype)
    reference = reference.to(dtype).double()  # fp16's smallest numbers aside, scaling by a power of two is exact
    used = allowed_error_used(kernel, original, reference)
    scaled = [t * 2.0**exponent for t in (kernel.double(), original.double(), reference)]
    if dtype == torch.float16:
        return
    assert allowed_error_used(scaled[0].to(dtype), scaled[1].to(dtype), scaled[2]) == pytest.approx(used)
    order = torch.randperm(len(reference), generator=torch.Generator().manual_seed(seed))
    assert allowed_error_used(kernel[order], original[order], reference[order]) == pytest.approx(used)


@FEW
@given(SEEDS, DTYPES, st.floats(1, 50))
def test_a_larger_error_uses_more(seed: int, dtype: torch.dtype, factor: float) -> None:
    kernel, original, reference = (t.double() for t in results(seed, dtype))
    further = reference + factor * (kernel - reference)
    original, reference = original.to(torch.float32), reference
    near = allowed_error_used(kernel.float(), original, reference)
    assert allowed_error_used(further.float(), original, reference) >= near * 0.99


def tensor(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("kernel", "original", "reference", "used"),
    [
        (tensor(1.0, 2.0), tensor(1.0, 2.0), tensor(1.0, 2.0), 0.0),
        (tensor(1.0), tensor(1.0, 2.0), tensor(1.0, 2.0), INF),
        (tensor(1.0, dtype=torch.float64), tensor(1.0), tensor(1.0), INF),
        (tensor(1.0, NAN), tensor(1.0, 2.0), tensor(1.0, 2.0), INF),
        (tensor(1.0, INF), tensor(1.0, 2.0), tensor(1.0, 2.0), INF),
        (tensor(1.0, 2.0), tensor(1.0, NAN), tensor(1.0, NAN), INF),
        (tensor(1.0, NAN), tensor(1.0, NAN), tensor(1.0, NAN), 0.0),
        (tensor(1.0, INF), tensor(1.0, INF), tensor(1.0, INF), 0.0),
        (tensor(1.0, -INF), tensor(1.0, INF), tensor(1.0, INF), INF),
        (tensor(1.0, INF), tensor(1.0, NAN), tensor(1.0, NAN), INF),
        (tensor(NAN), tensor(NAN), tensor(NAN), 0.0),
        (tensor(), tensor(), tensor(), 0.0),
        (tensor(1e-30), tensor(0.0), tensor(0.0), INF),
        (tensor(0.0), tensor(0.0), tensor(0.0), 0.0),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), torch.tensor([1, 2]), 0.0),
        (torch.tensor([1, 3]), torch.tensor([1, 2]), torch.tensor([1, 2]), INF),
        (torch.tensor([True]), torch.tensor([False]), torch.tensor([False]), INF),
        (torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.0), 0.0),
    ],
)
def test_edges(kernel: torch.Tensor, original: torch.Tensor, reference: torch.Tensor, used: float) -> None:
    reference = reference.double() if reference.is_floating_point() else reference
    assert allowed_error_used(kernel, original, reference) == used


def test_one_wrong_element_among_many_shows() -> None:
    """The Euclidean norm alone would let it pass."""
    reference = torch.ones(10**6, dtype=torch.float64)
    original = (reference * (1 + 1e-6)).float()
    kernel = original.clone()
    kernel[5] = 1.001
    assert allowed_error_used(kernel, original, reference) > 100


# --- verify=True ----------------------------------------------------------------------------------------------------


class Scale(torch.autograd.Function):
    """The identity with a gradient of another size."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        context.factor = factor
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * context.factor, None


def spoiled(spoil: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """A loader of an op's reference whose result is spoiled; layers and functions alike."""

    def load(target: Any, site: Any) -> Any:
        built = get_op(op_of(site)).load_reference().build(site.variant)
        if isinstance(built, type):
            right = built.forward  # type: ignore[attr-defined]
            return type("Spoiled", (nn.Module,), {"forward": lambda self, x: spoil(right(self, x))})

        def function(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
            left, second = built(q, k, cos, sin, unsqueeze_dim)
            return left, spoil(second)

        return function

    return load


def op_of(site: Any) -> str:
    ops = {"RMSNormVariant": "rms_norm", "GluVariant": "swiglu", "RotaryVariant": "rotary"}
    return ops[type(site.variant).__name__]


def with_offset(target: Any, site: Any) -> Any:
    import dataclasses

    variant = dataclasses.replace(site.variant, offset=1.0 - site.variant.offset)
    return get_op("rms_norm").load_reference().build(variant)


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "off by 5 %": (spoiled(lambda x: x * 1.05), "output"),  # an ulp of bfloat16 is 0.8 %
    "a constant more": (spoiled(lambda x: x + 0.05), "output"),
    "wrong gradient": (spoiled(lambda x: Scale.apply(x, 1.5)), "gradient"),
    "no gradient": (spoiled(lambda x: x.detach()), "no gradient"),
    "NaN": (spoiled(lambda x: x * float("nan")), "inf times"),
    "one NaN": (spoiled(lambda x: torch.where(torch.arange(x.shape[-1]) == 3, NAN, x)), "inf times"),
    "NaN gradient": (spoiled(lambda x: Scale.apply(x, float("nan"))), "gradient"),
    "zeros": (spoiled(lambda x: x * 0), "output"),
    "another dtype": (spoiled(lambda x: x.double()), "inf times"),
    "another shape": (spoiled(lambda x: x[..., :1]), "inf times"),
    "raises": (spoiled(lambda x: x.no_such_thing), "raised AttributeError"),
}
OPS = {"rms_norm": NORM, "swiglu": MLP, "rotary": ROTARY}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def qwen3(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    model = presets.build("qwen3", dtype=request.param, num_hidden_layers=1)
    with unchanged(model, **presets.inputs(model)):
        yield model


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("op", OPS)
def test_a_wrong_kernel_is_ruled_out_and_the_next_serves(
    qwen3: nn.Module, caplog: pytest.LogCaptureFixture, op: str, what: str
) -> None:
    load, words = WRONG[what]
    register_backend(op, "wrong", KernelImpl(load, lambda: (True, None)))
    kernelize(qwen3, {OPS[op]: KernelChoice(op, ("wrong", "loopback"))}, verify=True)
    (row,) = report(qwen3).rows
    assert (row.state, row.backend) == ("installed", "loopback")
    assert row.tried[0].backend == "wrong" and words in row.why(), row.why()
    assert [reason.code for reason in row.tried[0].reasons] == ["verify"]
    assert any("wrong is not installed" in r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)


@pytest.mark.parametrize("what", ["off by 5 %", "no gradient", "raises"])
@pytest.mark.parametrize("op", OPS)
def test_without_a_next_the_original_stays(qwen3: nn.Module, op: str, what: str) -> None:
    load, words = WRONG[what]
    register_backend(op, "wrong", KernelImpl(load, lambda: (True, None)))
    mapping = {OPS[op]: KernelChoice(op, ("wrong",))}
    before = state_of(qwen3)
    kernelize(qwen3, mapping, verify=True)
    (row,) = report(qwen3).rows
    assert (row.state, row.backend) == ("failed", None) and words in row.why()
    assert differences(before, state_of(qwen3)) == []
    with pytest.raises(ValueError, match=f"strict: {OPS[op]} is not installed: failed: wrong: .*{words}"):
        kernelize(qwen3, mapping, verify=True, strict=True)
    assert differences(before, state_of(qwen3)) == []
    kernelize(qwen3, mapping)
    assert report(qwen3).rows[0].state == "installed", "unasked, nothing is compared"


def test_the_wrong_offset(qwen3: nn.Module) -> None:
    register_backend("rms_norm", "wrong", KernelImpl(with_offset, lambda: (True, None)))
    kernelize(qwen3, {NORM: KernelChoice("rms_norm", ("wrong", "loopback"))}, verify=True, strict=True)
    assert report(qwen3).rows[0].backend == "loopback"


@pytest.mark.parametrize("name", presets.PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_right_kernels_stay_and_all_of_them_are_judged(name: str, dtype: torch.dtype) -> None:
    from twinkle.kernel import DEFAULT_KERNEL_CONFIG

    model = presets.build(name, dtype=dtype)
    kernelize(model, with_backends(DEFAULT_KERNEL_CONFIG, "loopback"), verify=True)
    rows = [row for row in report(model).rows if row.state not in ("unused", "kept")]
    assert len(rows) >= 1 and {row.state for row in rows} <= {"installed", "refused"}
    assert [row.target for row in rows if "not verified" in row.why()] == []
    unkernelize(model)


class Halved(modeling_qwen3.Qwen3RMSNorm):
    """A subclass of the target: right but for the factor."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) / 2


class Same(modeling_qwen3.Qwen3RMSNorm):
    """A subclass of the target that computes the same."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states)


def test_the_users_own_classes_are_judged_too(qwen3: nn.Module) -> None:
    kernelize(qwen3, {NORM: Halved}, verify=True)
    (row,) = report(qwen3).rows
    assert row.state == "failed" and "custom: output 0 is off" in row.why()
    kernelize(qwen3, {NORM: Halved})
    assert report(qwen3).rows[0].state == "installed", "another result may be what is wanted"
    kernelize(qwen3, {NORM: Same}, verify=True, strict=True)
    assert report(qwen3).rows[0].state == "installed"


class Tuple(modeling_qwen3.Qwen3RMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        return (super().forward(hidden_states),)


class Nothing(modeling_qwen3.Qwen3RMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        return None


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Tuple, "it returns a tuple of 1 where the original returns a tensor"),
        (Nothing, "it returns None, not a tensor or a tuple"),
    ],
)
def test_what_is_returned_has_the_originals_structure(qwen3: nn.Module, layer: type[nn.Module], words: str) -> None:
    """Of the user's own class always, of an op's backend when it is verified."""
    kernelize(qwen3, {NORM: layer})
    (row,) = report(qwen3).rows
    assert row.state == "refused" and words in row.why()
    register_backend("rms_norm", "mine", KernelImpl(lambda target: layer, lambda: (True, None)))
    kernelize(qwen3, {NORM: KernelChoice("rms_norm", ("mine",))}, verify=True)
    (row,) = report(qwen3).rows
    assert row.state == "failed" and words in row.why()


def test_what_cannot_be_judged_is_a_warning_and_under_strict_an_error(caplog: pytest.LogCaptureFixture) -> None:
    class Relu(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu()

    class Wrong(Relu):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu() + 1

    model = nn.Sequential(Relu())
    with pytest.raises(ValueError, match="Relu can't be verified: .*nothing knows small inputs.*leave out verify"):
        kernelize(model, {Relu: Wrong}, verify=True, strict=True)
    assert report(model).rows == [] and not caplog.records
    kernelize(model, {Relu: Wrong}, verify=True)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "installed, but custom: not verified" in record.getMessage()
    unkernelize(model)
    kernelize(model, {Relu: Wrong}, strict=True)  # nobody asked for a comparison
    assert report(model).rows[0].state == "installed"


def test_what_cannot_be_judged_is_installed_and_told(qwen3: nn.Module) -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    register_op("unknown", implementations={"mine": KernelImpl(lambda target: Doubled, lambda: (True, None))})
    kernelize(qwen3, {NORM: KernelChoice("unknown", ("mine",))}, verify=True)
    (row,) = report(qwen3).rows
    assert row.state == "installed" and "mine: not verified: nothing knows small inputs for it" in row.why()
    model = nn.ModuleList([toys.WithKeywords()])
    kernelize(model, {toys.WithKeywords: type("Mine", (toys.WithKeywords,), {"forward": toys.WithKeywords.forward})})
    unkernelize(model)
    meta = presets.build("qwen3", device="meta")
    kernelize(meta, {NORM: KernelChoice("rms_norm", ("loopback",))}, verify=True)
    assert "not verified: on the meta device there are no values" in report(meta).rows[0].why()


@pytest.mark.parametrize("missing", ["build", "example"])
def test_a_reference_that_lacks_what_verifying_needs(qwen3: nn.Module, missing: str, monkeypatch: Any) -> None:
    import sys
    import types

    from twinkle.kernel.ops.rms_norm import reference

    partial = types.ModuleType("partial_reference")
    vars(partial).update({k: v for k, v in vars(reference).items() if k != missing})
    monkeypatch.setitem(sys.modules, "partial_reference", partial)
    load = spoiled(lambda x: x)
    impl = KernelImpl(load, lambda: (True, None))
    register_op("partly", implementations={"mine": impl}, reference="partial_reference")
    kernelize(qwen3, {NORM: KernelChoice("partly", ("mine",))}, verify=True)
    (row,) = report(qwen3).rows
    assert row.state == "installed" and "not verified" in row.why() and missing in row.why()


def test_a_kernel_that_leaves_small_calls_to_the_original(qwen3: nn.Module) -> None:
    """It is judged on what it serves: here on inference only, there on nothing."""

    class Inference(nn.Module):
        accepts_call = staticmethod(lambda self, x: "needs a gradient" if torch.is_grad_enabled() else None)

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states.detach() * 1.05

    class Large(nn.Module):
        accepts_call = staticmethod(lambda self, x: "too small")

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            raise AssertionError("called outside its domain")

    implementations = {
        "inference": KernelImpl(lambda target: Inference, lambda: (True, None)),
        "large": KernelImpl(lambda target: Large, lambda: (True, None)),
    }
    reference = get_op("rms_norm").reference
    register_op("limited", implementations=implementations, reference=reference)
    kernelize(qwen3, {NORM: KernelChoice("limited", ("inference", "large"))}, verify=True)
    (row,) = report(qwen3).rows
    assert row.backend == "large" and "inference: output 0 is off" in row.why()
    assert "large: not verified: it leaves small inputs to the original: too small" in row.why()


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_gradients_are_judged_whatever_is_set_around_it(qwen3: nn.Module, around: Any) -> None:
    register_backend("rms_norm", "wrong", KernelImpl(WRONG["wrong gradient"][0], lambda: (True, None)))
    with around():
        kernelize(qwen3, {NORM: KernelChoice("rms_norm", ("wrong",))}, verify=True)
    (row,) = report(qwen3).rows
    assert row.state == "failed" and "gradient of input 0 is off" in row.why()


def test_every_dtype_of_a_model_is_judged(qwen3: nn.Module) -> None:
    """One variant, two dtypes, of which the kernel serves one well."""
    factors = {torch.float32: 1.0, torch.bfloat16: 1.0, torch.float16: 1.05}
    load = spoiled(lambda x: x * factors[x.dtype])
    register_backend("rms_norm", "wrong", KernelImpl(load, lambda: (True, None)))
    model = copy.deepcopy(qwen3)
    model.model.norm.half()
    kernelize(model, {NORM: KernelChoice("rms_norm", ("wrong", "loopback"))}, verify=True)
    assert {row.backend: row.instances for row in report(model).rows} == {"wrong": 4, "loopback": 1}


# --- whole models ---------------------------------------------------------------------------------------------------


def test_two_models_compared() -> None:
    original, model = presets.build("qwen3"), presets.build("qwen3")
    inputs = presets.inputs(original)
    mapping = {NORM: KernelChoice("rms_norm", ("loopback",)), ROTARY: KernelChoice("rotary", ("loopback",))}
    with kernelized(model, mapping):
        compared = compare_models(original, model, inputs, presets.loss)
    assert {c.name for c in compared} == {"logits", *(f"gradient of {n}" for n, _ in original.named_parameters())}
    assert all(c.used <= 1 for c in compared)
    with kernelized(model, {NORM: Halved}):
        compared = compare_models(original, model, inputs, presets.loss)
    assert max(c.used for c in compared) > 1000
    with kernelized(model, {ROTARY: lambda q, k, cos, sin, unsqueeze_dim=1: (q, k)}):
        compared = compare_models(original, model, inputs, presets.loss)
    assert max(c.used for c in compared) > 1000, "the original is judged without the process-wide function"

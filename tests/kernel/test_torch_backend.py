"""The torch backends, norms in full: numbers, gradients, what they leave to the original, and under a compiler.

Both formulations of the norm run on any device, so both are tested here; which is used where is data.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn

from tests.support.models import clean_process, installed, mapping, rows_of  # noqa: F401
from tests.support.torch_backend import compiled, site
from twinkle import presets
from twinkle.commands.comparison import judge
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.install import kernel_for
from twinkle.kernel.ops.derived import Example
from twinkle.kernel.ops.rms_norm import gated_reference, reference
from twinkle.kernel.ops.rms_norm import torch as norms
from twinkle.kernel.ops.rotary import reference as rotary_reference
from twinkle.kernel.ops.rotary import torch as rotary
from twinkle.kernel.ops.torch_support import FASTER
from twinkle.kernel.probe import random_tensor, variant_of
from twinkle.kernel.report import report
from twinkle.kernel.small_runs import run_call
from twinkle.kernel.targets import Site, Target, resolve_target
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import allowed_error_used, check_site

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VARIANTS = {
    "llama": reference.RMSNormVariant(0.0, "before", "weight", "eps"),
    "olmo": reference.RMSNormVariant(0.0, "after", "weight", "eps"),
    "gemma": reference.RMSNormVariant(1.0, "after", "weight", "eps"),
    "without weight": reference.RMSNormVariant(0.0, "after", None, "eps"),
    "factor": reference.RMSNormVariant(0.0, "factor", None, "eps"),
}
GATED = gated_reference.GatedRMSNormVariant("weight", "eps")


@pytest.fixture(params=norms.FORMULATIONS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One formulation of the norm after the other, whatever the device."""
    monkeypatch.setattr(norms, "formulation_for", lambda x: norms.FORMULATIONS[request.param])
    return request.param


def holder(width: int, offset: float = 0.0) -> nn.Module:
    """A module with the attributes of a norm."""
    module = nn.Module()
    module.weight = nn.Parameter(0.3 * random_tensor(width, seed=1) + (1 - offset))
    module.eps = 1e-6
    return module


def rows(*shape: int, seed: int = 2) -> torch.Tensor:
    """Rows of very different size."""
    return random_tensor(*shape, seed=seed) * torch.logspace(-2, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))


def used(kernel, original, exact, module: nn.Module, *args: torch.Tensor, dtype: torch.dtype) -> dict[str, float]:
    """The share of the allowed error that each result has used up; inputs are rounded to ``dtype`` first."""
    example = Example(copy.deepcopy(module).to(dtype).double(), tuple(a.to(dtype).double() for a in args))
    judge = run_call(exact, example, torch.float64, CPU)
    ours, theirs = (run_call(f, example, dtype, CPU) for f in (kernel, original))
    assert ours.keys() == theirs.keys() == judge.keys()
    return {name: allowed_error_used(ours[name], theirs[name], judge[name]) for name in judge}


# --- rms_norm, gated_rms_norm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_norm_is_within_the_judgement(name, kind, dtype):
    variant = VARIANTS[name]
    functions = [norms.load(None, site(variant)), reference.build(variant), reference.build(variant, torch.float64)]
    # The second and third have long sums in the gradient of the weight and of the input.
    for x in (rows(37, 5, 96), random_tensor(4000, 64), random_tensor(4, 8192)):
        module = holder(x.shape[-1], variant.offset)
        if variant.weight is None:
            del module.weight
        errors = used(*(f.forward for f in functions), module, x, dtype=dtype)
        assert max(errors.values()) <= 1, errors
        assert len(errors) == (2 if variant.weight is None else 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_norm_is_within_the_judgement(kind, dtype):
    functions = [
        norms.load_gated(None, site(GATED)),
        gated_reference.build(GATED),
        gated_reference.build(GATED, torch.float64),
    ]
    x, gate = rows(37, 5, 96), 3 * random_tensor(37, 5, 96, seed=4)
    errors = used(*(f.forward for f in functions), holder(96), x, gate, dtype=dtype)
    assert max(errors.values()) <= 1, errors
    assert len(errors) == 4


def test_small_weights_are_not_lost_in_one_plus_w(kind):
    """1 + 2**-10 rounded to bf16 is 1."""
    x = random_tensor(4096, 64).bfloat16()
    module = holder(64, 1.0).bfloat16()
    module.weight.data.fill_(2**-10)
    with torch.no_grad():
        y = norms.load(None, site(VARIANTS["gemma"])).forward(module, x).double()
    h = reference.rms_norm(x.double(), None, 1e-6, compute_dtype=torch.float64)
    assert float((y * h).sum() / (h * h).sum()) == pytest.approx(1 + 2**-10, abs=1e-4)


def test_norm_takes_any_layout_and_writes_to_no_input(kind):
    variant, module = VARIANTS["llama"], holder(16)
    forward, expected = norms.load(None, site(variant)).forward, reference.build(variant).forward
    base = random_tensor(6, 4, 16)
    inputs = [base.transpose(0, 1), base[::2], base.expand(2, 6, 4, 16), random_tensor(6, 40)[:, 3:35:2], base[:, 1]]
    for x in inputs:
        x = x.detach().requires_grad_()
        before, weight = x.detach().clone(), module.weight.detach().clone()
        ours, theirs = forward(module, x), expected(module, x)
        torch.testing.assert_close(ours, theirs)
        dy = random_tensor(16).expand_as(ours)  # an incoming gradient with strides of zero
        for first, second in zip(
            torch.autograd.grad(ours, [x, module.weight], dy, retain_graph=True),
            torch.autograd.grad(theirs, [x, module.weight], dy),
            strict=True,
        ):
            torch.testing.assert_close(first, second)
        again = torch.autograd.grad(ours, [x, module.weight], dy)
        torch.testing.assert_close(again[0], torch.autograd.grad(expected(module, x), x, dy)[0])
        assert torch.equal(x, before) and torch.equal(module.weight, weight)


def test_norm_of_no_rows(kind):
    module = holder(16)
    x = torch.zeros(0, 3, 16, requires_grad=True)
    y = norms.load(None, site(VARIANTS["llama"])).forward(module, x)
    gated = norms.load_gated(None, site(GATED)).forward(module, x, x.detach())
    assert y.shape == gated.shape == x.shape
    (y.sum() + gated.sum()).backward()
    assert x.grad.shape == x.shape
    assert torch.equal(module.weight.grad, torch.zeros(16))


@pytest.mark.parametrize("frozen", ["weight", "x", "both"])
def test_only_what_needs_a_gradient_gets_one(kind, frozen):
    module, x = holder(16), random_tensor(5, 16)
    module.weight.requires_grad_(frozen == "x")
    x.requires_grad_(frozen == "weight")
    y = norms.load(None, site(VARIANTS["llama"])).forward(module, x)
    assert y.requires_grad is (frozen != "both")
    if y.requires_grad:
        y.square().sum().backward()
        z = reference.build(VARIANTS["llama"]).forward(module, x)
        leaf = x if frozen == "weight" else module.weight
        torch.testing.assert_close(leaf.grad, torch.autograd.grad(z.square().sum(), leaf)[0])


@pytest.mark.parametrize(
    ("arguments", "offset"), [("x", 0.0), ("x weight", 0.0), ("x weight", 1.0), ("x weight gate", 0.0)]
)
def test_gradients_of_the_norm_of_both_orders(arguments, offset):
    x, gate = (random_tensor(3, 2, 8, seed=s).double().requires_grad_() for s in (1, 2))
    weight = random_tensor(8, seed=3).double().requires_grad_()
    inputs = {"x": x, "weight": weight, "gate": gate}
    inputs = {name: inputs[name] for name in arguments.split()}

    def norm(*tensors: torch.Tensor) -> torch.Tensor:
        given = dict(zip(inputs, tensors, strict=True))
        return norms.few_passes(given["x"], given.get("weight"), given.get("gate"), 1e-6, offset)

    assert torch.autograd.gradcheck(norm, tuple(inputs.values()))
    assert torch.autograd.gradgradcheck(norm, tuple(inputs.values()))


def test_autocast_changes_nothing(monkeypatch):
    """On a GPU autocast makes F.rms_norm return fp32."""
    module, x = holder(64), random_tensor(512, 64).requires_grad_()
    layer = norms.load(None, site(VARIANTS["llama"]))
    forward = layer.forward
    outside = torch.autograd.grad(forward(module, x).square().sum(), [x, module.weight])
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(forward(module, x).square().sum(), [x, module.weight])
        monkeypatch.setattr(norms, "formulation_for", lambda x: norms.FORMULATIONS["accelerator"])
        refused = layer.accepts_call(module.bfloat16(), x.bfloat16())
    assert all(map(torch.equal, inside, outside))
    assert refused == "autocast would turn F.rms_norm's bfloat16 into float32"
    assert layer.accepts_call(module, x.bfloat16()) is None


# --- what is left to the original -------------------------------------------------------------------------------------

LLAMA = "transformers.models.llama.modeling_llama"


def test_other_dtypes_of_the_weight_go_to_the_original_and_are_counted():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    model = nn.Sequential(LlamaRMSNorm(16))
    expected = model(random_tensor(3, 16).bfloat16())
    kernelize(model, {f"{LLAMA}.LlamaRMSNorm": KernelChoice("rms_norm", ("torch",))})
    assert torch.equal(model(random_tensor(3, 16).bfloat16()), expected)
    assert expected.dtype == torch.float32
    (row,) = report(model).rows
    assert (row.calls, row.fallbacks) == (0, {"the weight is float32, the input bfloat16": 1})
    model(random_tensor(3, 16))
    assert row.calls == 1


def test_the_formulation_follows_the_device_of_the_call():
    norm, refuse = norms.formulation_for(torch.zeros(1))
    assert (norm, refuse) == (norms.few_passes, norms.refuse_few_passes)
    assert norms.formulation_for(torch.zeros(1, device="meta")).norm is norms.fused


def test_a_gate_of_another_shape_goes_to_the_original():
    layer, module = norms.load_gated(None, site(GATED)), holder(16)
    x = random_tensor(3, 16)
    assert layer.accepts_call(module, x, x) is layer.accepts_call(module, x) is None
    assert layer.accepts_call(module, x, x[:1]) == "the gate's shape is (1, 16), the input's (3, 16)"
    assert torch.equal(layer.forward(module, x), norms.load(None, site(VARIANTS["llama"])).forward(module, x))


def test_torch_func_goes_to_the_original():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    model = nn.Sequential(LlamaRMSNorm(16))
    parameters, x = dict(model.named_parameters()), random_tensor(3, 16)

    def gradient():
        return torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().sum())(parameters)

    expected = gradient()
    kernelize(model, {f"{LLAMA}.LlamaRMSNorm": KernelChoice("rms_norm", ("torch",))})
    assert torch.equal(gradient()["0.weight"], expected["0.weight"])
    (row,) = report(model).rows
    assert (row.calls, row.fallbacks) == (0, {"inside a functorch transform": 1})


def test_forward_mode_differentiation_goes_to_the_original():
    from torch.autograd import forward_ad
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    model, x, tangent = nn.Sequential(LlamaRMSNorm(16)), random_tensor(3, 16), random_tensor(3, 16, seed=1)

    def derivative():
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent))).tangent

    expected = derivative()
    kernelize(model, {f"{LLAMA}.LlamaRMSNorm": KernelChoice("rms_norm", ("torch",))})
    assert torch.equal(derivative(), expected)
    assert report(model).rows[0].fallbacks == {"inside forward-mode differentiation": 1}


def test_nested_tensors_go_to_the_original():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    model = nn.Sequential(LlamaRMSNorm(16))
    x = torch.nested.nested_tensor([random_tensor(n, 16, seed=n) for n in (3, 5)], layout=torch.jagged)
    expected = model(x)
    kernelize(model, {f"{LLAMA}.LlamaRMSNorm": KernelChoice("rms_norm", ("torch",))})
    assert torch.equal(model(x).values(), expected.values())
    assert report(model).rows[0].fallbacks == {"a nested tensor": 1}


@pytest.mark.parametrize("shape", [(2, 3, 1), ()])
def test_inputs_that_the_original_spreads_go_to_it(shape):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    model, x = nn.Sequential(LlamaRMSNorm(16)), random_tensor(6)[: math.prod(shape)].view(shape)
    expected = model(x)
    kernelize(model, {f"{LLAMA}.LlamaRMSNorm": KernelChoice("rms_norm", ("torch",))}, strict=True)
    assert expected.shape == (*shape[:-1], 16) and torch.equal(model(x), expected)
    assert report(model).rows[0].calls == 0


def test_a_number_without_dimensions_and_a_norm_without_a_weight():
    from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

    model, x = nn.Sequential(Gemma4RMSNorm(16, with_scale=False)), torch.tensor(3.0)
    expected = model(x)
    kernelize(model, {Gemma4RMSNorm: KernelChoice("rms_norm", ("torch",))}, strict=True)
    assert torch.equal(model(x), expected)
    assert report(model).rows[0].fallbacks == {"a tensor without dimensions": 1}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_is_of_the_original_and_can_be_saved(tmp_path):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    model, x = nn.Sequential(LlamaRMSNorm(16)), random_tensor(3, 16)
    expected = model(x)
    kernelize(model, {f"{LLAMA}.LlamaRMSNorm": KernelChoice("rms_norm", ("torch",))})
    torch.jit.trace(model, x).save(tmp_path / "traced.pt")
    assert torch.equal(torch.jit.load(tmp_path / "traced.pt")(x), expected)
    assert report(model).rows[0].fallbacks.keys() == {"inside torch.jit.trace"}


def test_a_site_where_the_original_is_faster_keeps_it():
    all_accepts = {"rms_norm": norms.accepts, "gated_rms_norm": norms.accepts_gated, "rotary": rotary.accepts}
    for op, accepts in all_accepts.items():
        variant = rotary_reference.RotaryVariant(rotary_reference.Dialect(), False, rotary_reference.SIGNATURES[0])
        for device in ("cpu", "cuda", "meta", "mps"):
            reason = accepts(site(variant, device))
            assert (reason is None) is (device in FASTER[op]), (op, device)
            if reason is not None:
                assert f"faster than the original's {op} on {device}" in str(reason)
                assert f"benchmarks/results/{device}/ops.json" in str(reason)


# --- under a compiler -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma", "gated"])
def test_compiled_norm_gives_the_same_bits(name, kind, dtype):
    layer = norms.load_gated(None, site(GATED)) if name == "gated" else norms.load(None, site(VARIANTS[name]))
    module = holder(16).to(dtype)
    leaves = [random_tensor(3, 16, seed=s).to(dtype).requires_grad_() for s in range(2 if name == "gated" else 1)]

    def call(*args):
        assert layer.accepts_call(module, *args) is None
        return layer.forward(module, *args)

    eager, traced = call(*leaves), compiled(call)(*leaves)
    assert torch.equal(eager, traced)
    for a, b in zip(*(torch.autograd.grad(y.sum(), [*leaves, module.weight]) for y in (eager, traced)), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        assert torch.equal(compiled(call)(*leaves), eager)


# --- in models --------------------------------------------------------------------------------------------------------

NORM_CLASSES = {
    "qwen3.modeling_qwen3.Qwen3RMSNorm": "rms_norm",
    "gemma.modeling_gemma.GemmaRMSNorm": "rms_norm",
    "olmo2.modeling_olmo2.Olmo2RMSNorm": "rms_norm",
    "gemma4.modeling_gemma4.Gemma4RMSNorm": "rms_norm",
    "qwen3_next.modeling_qwen3_next.Qwen3NextRMSNormGated.forward": "gated_rms_norm",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORM_CLASSES)
def test_verification_of_real_classes_passes(name, kind, dtype):
    target = resolve_target(f"transformers.models.{name}")
    assert isinstance(target, Target)
    module, op = target.owner(32).to(dtype), NORM_CLASSES[name]
    found = Site(module, name, target.owner, "forward", target.owner.forward, CPU, dtype)
    of_op = {"rms_norm": reference, "gated_rms_norm": gated_reference}[op]
    found = dataclasses.replace(found, variant=variant_of(of_op, found, {}))
    load = {"rms_norm": norms.load, "gated_rms_norm": norms.load_gated}[op]
    kernel = kernel_for(target, found.original, load(target, found))
    assert check_site(found, kernel, op) is None


INSTALLED = {
    "llama": {"LlamaRMSNorm": 5, "apply_rotary_pos_emb": 1},
    "gemma": {"GemmaRMSNorm": 5, "apply_rotary_pos_emb": 1},
    "olmo2": {"Olmo2RMSNorm": 9, "apply_rotary_pos_emb": 1},
    "qwen3_next": {
        "Qwen3NextRMSNorm": 7,
        "Qwen3NextRMSNormGated.forward": 1,
        "apply_rotary_pos_emb": 1,
        "Qwen3NextExperts.forward": 1,
    },
    "glm4": {"Glm4RMSNorm": 9, "apply_rotary_pos_emb": 1},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", INSTALLED)
def test_whole_models(family, dtype):
    model = presets.build(family, dtype=dtype)
    original = copy.deepcopy(model)
    kernelize(model, mapping("torch", f"{family}."), verify=True)
    assert installed(model) == {f"{family}.{target}": n for target, n in INSTALLED[family].items()}
    used = judge(original, model)
    assert used and max(used.values()) <= 1, used
    for target, row in rows_of(model).items():
        if row.state == "installed":
            assert (row.backend, bool(row.calls), row.fallbacks) == ("torch", True, {}), target
        else:
            assert row.why().startswith("torch: backend torch is not registered for op"), target
    ops = {row.op for row in rows_of(model).values() if row.state != "installed"}
    assert ops <= {"swiglu", "geglu", "moe_router", "moe_block"}
    unkernelize(model)


def test_every_op_with_a_torch_backend_has_a_measured_place():
    from twinkle.kernel import registry

    with_torch = {op for op, definition in registry.ops().items() if "torch" in definition.implementations}
    # One saves memory, one is for compilers and machines without Triton, two are PyTorch's own; none is in a default.
    assert with_torch - {"causal_lm_loss", "moe_experts", "sdpa_attention", "fla"} == FASTER.keys()
    assert all(itertools.chain(FASTER.values()))

"""Our Triton kernels under ``torch.compile``: no graph break, the same numbers, sizes that vary.

With inductor on a GPU, which sees into the kernels; where they are interpreted they are opaque to the compiler, so that
``aot_eager`` shows all there is to see.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from tests.support.triton_device import DEVICE, by_device, laid_out
from twinkle import presets
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, kernelize
from twinkle.kernel.ops.fused_norms.add_triton import add_rms_norm
from twinkle.kernel.ops.fused_norms.qk_triton import qk_norm_rotary
from twinkle.kernel.ops.glu.triton import fused_glu, glu
from twinkle.kernel.ops.rms_norm.triton import rms_norm
from twinkle.kernel.ops.rotary.reference import DIALECTS, SIGNATURES, RotaryVariant
from twinkle.kernel.ops.rotary.triton import load as load_rotary
from twinkle.kernel.report import report
from twinkle.kernel.targets import Site
from twinkle.kernel.testing import with_backends
from twinkle.kernel.undo import unkernelize

pytestmark = pytest.mark.slow  # make test-slow

BACKEND = by_device("aot_eager", "inductor")
WIDTH = by_device(16, 256)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rotary(number: int) -> Callable[..., Any]:
    variant = RotaryVariant(DIALECTS[number], True, SIGNATURES[0])
    return load_rotary(None, Site(None, "r", None, "r", None, torch.device(DEVICE), None, variant))  # type: ignore[arg-type]


def tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return laid_out(shape, dtype, "contiguous", seed)


def norm_case(offset: float, cast: str, length: int) -> tuple[Any, dict[str, Any], set[str]]:
    inputs = {"x": tensor(2, length, WIDTH, seed=1), "weight": tensor(WIDTH, seed=2)}
    return lambda x, weight: rms_norm(x, weight, None, 1e-5, offset, cast), inputs, {"x", "weight"}


def frozen_norm_case(length: int) -> tuple[Any, dict[str, Any], set[str]]:
    function, inputs, _ = norm_case(0.0, "before", length)
    return function, inputs, {"x"}


def bare_norm_case(length: int) -> tuple[Any, dict[str, Any], set[str]]:
    return lambda x: rms_norm(x, None, None, 1e-5, 0.0, "factor"), {"x": tensor(2, length, WIDTH, seed=1)}, {"x"}


def gated_case(length: int) -> tuple[Any, dict[str, Any], set[str]]:
    inputs = {n: tensor(2, length, WIDTH, seed=i) for i, n in enumerate(("x", "gate"))}
    inputs["weight"] = tensor(WIDTH, seed=3)
    return lambda x, gate, weight: rms_norm(x, weight, gate, 1e-5, 0.0, "before"), inputs, set(inputs)


def glu_case(length: int) -> tuple[Any, dict[str, Any], set[str]]:
    inputs = {n: tensor(2, length, WIDTH, seed=i) for i, n in enumerate(("gate", "up"))}
    return lambda gate, up: glu(gate, up, "gelu_tanh"), inputs, set(inputs)


def fused_case(length: int) -> tuple[Any, dict[str, Any], set[str]]:
    return lambda t: fused_glu(t, "silu"), {"t": tensor(2, length, 2 * WIDTH, seed=1)}, {"t"}


def rotary_case(number: int, heads_at: int, length: int) -> tuple[Any, dict[str, Any], set[str]]:
    function, head_dim = rotary(number), by_device(8, 64)
    table = head_dim // 2 if DIALECTS[number].table == "half_width" else head_dim
    inputs = {n: tensor(2, length, 3, head_dim, seed=i) for i, n in enumerate("qk")}
    if heads_at == 1:  # as models make them: a view of the projection's output
        inputs = {name: t.transpose(1, 2) for name, t in inputs.items()}
    inputs |= {n: tensor(1, length, table, seed=4 + i) for i, n in enumerate(("cos", "sin"))}
    return lambda q, k, cos, sin: function(q, k, cos, sin, unsqueeze_dim=heads_at), inputs, {"q", "k"}


def qk_case(heads_at: int, length: int, frozen: bool = False) -> tuple[Any, dict[str, Any], set[str]]:
    head_dim = by_device(8, 64)
    inputs = {n: tensor(2, length, 3 - i, head_dim, seed=i) for i, n in enumerate("qk")}
    if heads_at == 1:
        inputs = {name: t.transpose(1, 2) for name, t in inputs.items()}
    inputs |= {n: tensor(head_dim, seed=2 + i) for i, n in enumerate(("q_weight", "k_weight"))}
    inputs |= {n: tensor(1, length, head_dim // 2, seed=4 + i) for i, n in enumerate(("cos", "sin"))}
    options: Any = {"q_eps": 1e-5, "k_eps": 1e-5, "offset": 0.0, "cast": "before", "heads_at": heads_at}
    return lambda **given: qk_norm_rotary(**given, **options), inputs, {"q", "k", *({} if frozen else {"q_weight"})}


def add_case(length: int) -> tuple[Any, dict[str, Any], set[str]]:
    inputs = {n: tensor(2, length, WIDTH, seed=i) for i, n in enumerate(("residual", "summand"))}
    inputs["weight"] = tensor(WIDTH, seed=3)
    options: Any = {"eps": 1e-5, "offset": 1.0, "cast": "after"}
    return lambda residual, summand, weight: add_rms_norm(residual, summand, weight, **options), inputs, set(inputs)


CASES: dict[str, Callable[[int], tuple[Any, dict[str, Any], set[str]]]] = {
    "norm": lambda length: norm_case(0.0, "before", length),
    "norm, 1 + w": lambda length: norm_case(1.0, "after", length),
    "norm with a frozen weight": frozen_norm_case,
    "norm without weight": bare_norm_case,
    "gated norm": gated_case,
    "glu": glu_case,
    "fused glu": fused_case,
    "rotary": lambda length: rotary_case(0, 1, length),
    "rotary, pairs to halves": lambda length: rotary_case(7, 1, length),
    "rotary, heads last": lambda length: rotary_case(8, 2, length),
    "norms and rotary": lambda length: qk_case(2, length),
    "norms and rotary, heads first": lambda length: qk_case(1, length, frozen=True),
    "sum and norm": add_case,
}


def run(
    function: Callable[..., Any], inputs: dict[str, Any], needed: Collection[str], dynamic: int | None = None
) -> list[torch.Tensor]:
    """Results and gradients; dimensions of the size ``dynamic`` are marked as such."""
    given = {name: t.detach().requires_grad_(name in needed) for name, t in inputs.items()}
    for t in given.values():
        for dimension in [d for d, size in enumerate(t.shape) if size == dynamic]:
            torch._dynamo.mark_dynamic(t, dimension)
    results = function(**given)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    seeds = [tensor(*result.shape, seed=20 + i, dtype=result.dtype) for i, result in enumerate(results)]
    return [*results, *torch.autograd.grad(results, [given[name] for name in given if name in needed], seeds)]


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_function_gives_the_same_numbers_in_one_graph(name: str) -> None:
    function, inputs, needed = CASES[name](5)
    compiled = torch.compile(function, fullgraph=True, backend=BACKEND)
    torch.testing.assert_close(run(compiled, inputs, needed), run(function, inputs, needed), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ("norm", "gated norm", "glu", "fused glu", "rotary", "rotary, heads last", "norms and rotary", "sum and norm"),
)
def test_one_program_serves_all_lengths(name: str) -> None:
    lengths = by_device((5, 6, 7), (130, 5, 3000))  # none is another dimension's size
    function = CASES[name](lengths[0])[0]
    counter = torch._dynamo.testing.CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for length in lengths:
        _, inputs, needed = CASES[name](length)
        expected = run(function, inputs, needed)
        torch.testing.assert_close(run(compiled, inputs, needed, length), expected, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


# --- the registered operators -----------------------------------------------------------------------------------------


def _opcheck(name: str, *args: Any) -> None:
    torch.library.opcheck(getattr(torch.ops.twinkle, name).default, args)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("gated", (False, True))
def test_opcheck_of_the_norm(gated: bool, dtype: torch.dtype) -> None:
    x, weight = (tensor(*shape, seed=1, dtype=dtype).requires_grad_() for shape in ((2, 3, 16), (16,)))
    gate = tensor(2, 3, 16, seed=2, dtype=dtype).requires_grad_() if gated else None
    _opcheck("rms_norm", x, weight, gate, 1e-5, 0.0, "before")
    _opcheck("rms_norm", x.detach().transpose(0, 1), None, None, 1e-5, 0.0, "after")
    plain = [None if t is None else t.detach() for t in (x, x, weight, gate)]
    for needs_dw in (True, False):
        _opcheck("rms_norm_backward", *plain, 1e-5, 0.0, needs_dw)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def test_opcheck_of_the_product(dtype: torch.dtype) -> None:
    gate_up = tensor(2, 3, 32, seed=1, dtype=dtype)
    gate, up = gate_up.chunk(2, -1)
    _opcheck("glu", gate.detach().clone().requires_grad_(), up.detach().clone().requires_grad_(), "silu")
    _opcheck("glu", gate, up, "gelu")
    _opcheck("glu_backward", gate.contiguous(), gate, up, "silu")


@pytest.mark.parametrize("number", range(len(DIALECTS)))
def test_opcheck_of_the_rotation(number: int) -> None:
    _, inputs, _ = rotary_case(number, 1, 2)
    q, k, cos, sin = (inputs[name] for name in ("q", "k", "cos", "sin"))
    _opcheck("rotary", q.detach().requires_grad_(), k.detach().requires_grad_(), cos, sin, number, 1, False)
    _opcheck("rotary", q, q.new_empty(0, 0, 0, 0), cos, sin, number, 1, True)


@pytest.mark.parametrize("heads_at", (1, 2))
def test_opcheck_of_norms_and_rotary(heads_at: int) -> None:
    _, inputs, _ = qk_case(heads_at, 2)
    leaves = [t.detach().clone().requires_grad_(name[0] in "qk") for name, t in inputs.items()]
    _opcheck("qk_norm_rotary", *leaves, 1e-5, 1e-5, 0.0, "before", heads_at)
    plain = list(inputs.values())
    for needs_dw in (True, False):
        _opcheck("qk_norm_rotary_backward", *plain[:2], *plain, 1e-5, 1e-5, 0.0, heads_at, needs_dw)


def test_opcheck_of_a_sum_and_its_norm() -> None:
    x, weight = tensor(2, 3, 16, seed=1), tensor(16, seed=2)
    _opcheck("add_rms_norm", *[t.clone().requires_grad_() for t in (x, x, weight)], 1e-5, 0.0, "before")
    for needs_dw in (True, False):
        _opcheck("add_rms_norm_backward", x, x, x, weight, torch.ones(6, device=DEVICE), 0.0, needs_dw)


def test_the_backward_of_the_backward_operator_turns_forward() -> None:
    _, inputs, _ = rotary_case(7, 1, 2)
    q, k, cos, sin = (inputs[name] for name in ("q", "k", "cos", "sin"))
    leaf = q.detach().requires_grad_()
    back = torch.ops.twinkle.rotary(leaf, k, cos, sin, 7, 1, True)[0]
    (gradient,) = torch.autograd.grad(back, leaf, q)
    torch.testing.assert_close(gradient, torch.ops.twinkle.rotary(q, k, cos, sin, 7, 1, False)[0])


def test_a_gradient_of_a_compiled_norms_gradient_is_an_error() -> None:
    x, weight = (tensor(*shape, seed=1).requires_grad_() for shape in ((2, 16), (16,)))
    y = torch.ops.twinkle.rms_norm(x, weight, None, 1e-5, 0.0, "before")[0]
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        gradient.sum().backward()


# --- whole models -----------------------------------------------------------------------------------------------------

MODELS = by_device(("qwen3", "gemma2"), ("qwen3", "gemma2", "glm4", "phi3", "ernie4_5", "olmo2"))


@pytest.mark.parametrize("name", MODELS)
def test_a_kernelized_model_is_compiled_whole(name: str) -> None:
    model = presets.build(name, device=DEVICE, num_hidden_layers=1)
    ops = ("rms_norm", "gated_rms_norm", "swiglu", "geglu", "rotary")
    kernelize(model, with_backends({k: c for k, c in DEFAULT_KERNEL_CONFIG.items() if c.op in ops}, "triton"))
    inputs = presets.inputs(model, batch=1, length=6, device=DEVICE)
    graphs: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, arguments: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(BACKEND)(graph, arguments)

    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend=note)
    results = []
    for one in (model, compiled):
        outputs = one(**inputs)
        presets.loss(outputs).backward()
        assert isinstance(one, nn.Module)
        results.append([outputs.logits.detach(), *(p.grad for p in one.parameters() if p.grad is not None)])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
    # One graph, with our operators in it and not the originals that they replace.
    (graph,) = graphs
    called = [node.target.name() for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    norms = sum("norm" in module_name for module_name, _ in model.named_modules())
    assert called.count("twinkle::rms_norm") == norms >= 3
    assert (called.count("twinkle::glu"), called.count("twinkle::rotary")) == (1, 1)
    rows = [row for row in report(compiled._orig_mod).rows if row.state == "installed"]
    assert rows and all(row.counts.compiled for row in rows)
    assert [row.fallbacks for row in rows if row.fallbacks] == []
    for one in (model, compiled._orig_mod):
        unkernelize(one)

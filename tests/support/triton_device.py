"""Where the tests of the Triton kernels run, and how their results are judged.

On a GPU where there is one, in realistic sizes; with TRITON_INTERPRET=1 on the CPU, in Triton's interpreter, in small
ones. TRITON_TEST_EXAMPLES sets how many examples a property test draws, over its dtypes together.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from twinkle.kernel.ops.fla.library import wrong_gradient
from twinkle.kernel.ops.fused_norms import add_triton, qk_triton
from twinkle.kernel.ops.glu import triton as glu
from twinkle.kernel.ops.rms_norm import triton as rms_norm
from twinkle.kernel.ops.rms_norm import triton_launch
from twinkle.kernel.ops.rotary import triton as rotary
from twinkle.kernel.probe import random_tensor
from twinkle.kernel.verify import allowed_error_used
from twinkle.memory import Memory
from twinkle.triton_programs import Program

INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
ON_GPU = DEVICE == "cuda"
NO_GPU = "needs a GPU; here Triton is interpreted"

T = TypeVar("T")


def by_device(cpu: T, gpu: T) -> T:
    return gpu if ON_GPU else cpu


DELTA_NETS = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_moe"})


def skip_without_gradients(family: str) -> None:
    """Skips all of a test where flash-linear-attention, which transformers calls if it is there, refuses gradients."""
    if family in DELTA_NETS and ON_GPU and importlib.util.find_spec("fla"):
        reason = wrong_gradient(torch.device(DEVICE))
        if reason is not None:
            pytest.skip(reason)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Derandomised: a failure in CI is there again on the next machine. Not shrunk: that takes minutes.
examples = settings(
    max_examples=-(-int(os.environ.get("TRITON_TEST_EXAMPLES", "25")) // len(DTYPES)),
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)

ROWS = by_device(
    # Few, or many more than one program takes; up to four dimensions, not all of which merge.
    [(), (1,), (7,), (2, 3), (33,), (2, 3, 2), (2, 2, 3, 2)],
    [(), (1,), (1000,), (4, 1023), (3, 7, 65), (2, 3, 5, 31)],
)
WIDTHS = by_device([1, 2, 7, 16, 33, 64, 100], [1, 2, 33, 64, 128, 1000, 1536, 4096, 5000])


# --- layouts ----------------------------------------------------------------------------------------------------------


def _swapped(values: torch.Tensor) -> torch.Tensor:
    return values.transpose(0, -2).contiguous().transpose(0, -2) if values.dim() > 1 else values


def _last_outermost(values: torch.Tensor) -> torch.Tensor:
    return values.movedim(-1, 0).contiguous().movedim(0, -1)


def _sliced(values: torch.Tensor) -> torch.Tensor:
    room = values.new_full([2 * size + 3 for size in values.shape], float("nan"))
    view = room[tuple(slice(1, 1 + 2 * size, 2) for size in values.shape[:-1]) + (slice(2, 2 + values.shape[-1]),)]
    return view.copy_(values)


def _stepped(values: torch.Tensor) -> torch.Tensor:
    room = values.new_full((*values.shape[:-1], 2 * values.shape[-1]), float("nan"))
    return room[..., ::2].copy_(values)


def _misaligned(values: torch.Tensor) -> torch.Tensor:
    return values.new_empty(values.numel() + 1)[1:].view(values.shape).copy_(values)


def _expanded(values: torch.Tensor) -> torch.Tensor:
    return values[:1].expand_as(values) if values.dim() > 1 else values


def _one_number(values: torch.Tensor) -> torch.Tensor:
    return values.flatten()[0].expand(values.shape)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda values: values,
    "two dimensions swapped": _swapped,
    "last dimension outermost": _last_outermost,
    "a slice with gaps": _sliced,
    "every second column": _stepped,
    "an odd storage offset": _misaligned,
    "one row for all": _expanded,
    "one number for all": _one_number,
}
"""Ways in which the same shape can lie in memory; the last two also make values equal."""


def laid_out(shape: Sequence[int], dtype: torch.dtype, layout: str, seed: int, *, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers of a shape on the tests' device, in one of LAYOUTS."""
    return LAYOUTS[layout]((scale * random_tensor(*shape, seed=seed)).to(DEVICE, dtype))


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, whose memory holds those of the other sign."""
    return torch._neg_view(-tensor)


gradient_layouts = st.sampled_from(list(LAYOUTS))
# Not one number for all: the gradient of a norm of equal numbers is nothing but rounding.
layouts = st.sampled_from(list(LAYOUTS)[:-1])


# --- launches ---------------------------------------------------------------------------------------------------------
class _Distrustful(Memory[Any]):
    """Remembers nothing, so that everything is found out anew, and must then be what it was for that key before."""

    def get(self, key: Any, default: Any = None) -> Any:
        return default

    def add(self, key: Any, value: Any) -> Any:
        known = self.setdefault(key, value)
        assert _facts(known) == _facts(value), f"two layouts with the key {key}"
        return value


def _facts(value: Any) -> Any:
    """What a program, or what was found out about a layout, consists of; backwards come later, see below."""
    if isinstance(value, Program):
        return value.kernel, value.launch
    if isinstance(value, functools.partial):
        return value.func, value.keywords
    if not hasattr(value, "__slots__"):
        return value
    return {name: _facts(getattr(value, name)) for name in value.__slots__ if name != "backwards"}


@pytest.fixture(autouse=True)
def layouts_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layout that meets a kernel in a test has a key that no other one has.

    Otherwise a launch is looked up by its key, and then nothing else of it is looked at.
    """

    def backward(make: Any, dy: Any, x: Any, weight: Any, gate: Any, results: Any, eps: float, offset: float) -> Any:
        made: list[Any] = []
        note: Any = lambda kernel, launch: made.append((kernel, launch)) or make(kernel, launch)  # noqa: E731
        call = original(note, dy, x, weight, gate, results, eps, offset)
        if make is Program:
            key = (triton_launch.layout_of(x, weight, gate, (eps, offset, "")), dy.stride(), results[1] is None)
            assert _backwards.setdefault(key, made) == made, f"two backwards with the key {key}"
        return call

    original = triton_launch.backward
    monkeypatch.setattr(triton_launch, "backward", backward)
    layouts = [(backend, "_layouts") for backend in (rms_norm, qk_triton, add_triton)]
    for backend, name in (*layouts, (glu, "_programs"), (rotary, "_programs")):
        monkeypatch.setattr(backend, name, _memories.setdefault(backend.__name__, _Distrustful()))


_memories: dict[str, _Distrustful] = {}
_backwards: dict[Any, Any] = {}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Program, tuple[torch.Tensor | None, ...]]]:
    """The programs that a test launches, each with its tensors."""
    seen: list[tuple[Program, tuple[torch.Tensor | None, ...]]] = []

    def call(program: Program, *tensors: torch.Tensor | None) -> None:
        seen.append((program, tensors))
        original(program, *tensors)

    original = Program.__call__
    monkeypatch.setattr(Program, "__call__", call)
    return seen


# --- judgement --------------------------------------------------------------------------------------------------------

Function = Callable[..., Any]


def tensors_of(results: Any) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


class Step:
    """A forward and two backward calls of one function.

    Attributes:
        results: outputs, then gradients by name.
        leaves: the tensors that were differentiated, by name.
    """

    def __init__(
        self,
        function: Function,
        inputs: Mapping[str, torch.Tensor | None],
        needed: Collection[str],
        seeds: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> None:
        given = {name: None if t is None else t.detach().requires_grad_(name in needed) for name, t in inputs.items()}
        held = {name: (t, t.detach().clone()) for name, t in given.items() if t is not None}
        self.outputs = tensors_of(function(**given))
        self.leaves = {name: t for name, t in given.items() if t is not None and name in needed}
        self.results = {f"output {i}": output.detach() for i, output in enumerate(self.outputs)}
        self.gradients: dict[str, torch.Tensor] = {}
        if self.leaves:
            # Autograd functions make all their results differentiable; plain operators only those that are.
            outputs = [output for output in self.outputs if output.requires_grad]
            grads = [seeds(output, i) for i, output in enumerate(self.outputs) if output.requires_grad]
            held |= {f"incoming gradient {i}": (grad, grad.clone()) for i, grad in enumerate(grads)}
            held |= {f"output {i}": (output, output.detach().clone()) for i, output in enumerate(self.outputs)}
            wrt = list(self.leaves.values())
            first = torch.autograd.grad(outputs, wrt, grads, retain_graph=True)
            kept = [gradient.clone() for gradient in first]
            second = torch.autograd.grad(outputs, wrt, grads)
            self.gradients = dict(zip(self.leaves, second, strict=True))
            self.results |= {f"gradient of {name}": gradient for name, gradient in self.gradients.items()}
            assert all(map(torch.equal, kept, second)), "a second backward call gives other bits"
        overwritten = [name for name, (now, before) in held.items() if not torch.equal(now, before)]
        assert overwritten == []


Inputs = Callable[[int], Mapping[str, torch.Tensor | None]]


def assert_judged(
    kernel: Function,
    original: Function,
    exact: Function,
    inputs: Inputs,
    *,
    times: int = 1,
    needed: Collection[str] | None = None,
    gradient_layout: str = "contiguous",
) -> Step:
    """Runs a kernel, the formula that it replaces and the same in fp64, forward and backward, and judges the kernel.

    Args:
        kernel, original, exact: called with ``inputs`` by name; ``exact`` gets them in fp64.
        inputs: makes them from a number.
        times: how many such inputs are judged as one. Whose error is larger in a handful of numbers is luck.
        needed: which inputs' gradients are wanted; all when None.
        gradient_layout: how the incoming gradients lie.

    Returns:
        the kernel's last step.
    """
    steps = [_three_steps(kernel, original, exact, inputs(n), needed, gradient_layout, n) for n in range(times)]
    names = list(steps[0][1].results)
    assert all(list(step.results) == names for three in steps for step in three)
    used = {}
    for name in names:
        assert all(ours.results[name].shape == theirs.results[name].shape for ours, theirs, _ in steps)
        each = zip(*steps, strict=True)  # the kernel's steps, then the original's, then the exact ones
        used[name] = allowed_error_used(*[torch.cat([s.results[name].flatten() for s in same]) for same in each])
    assert max(used.values()) <= 1, used
    return steps[-1][0]


def _three_steps(
    kernel: Function,
    original: Function,
    exact: Function,
    inputs: Mapping[str, torch.Tensor | None],
    needed: Collection[str] | None,
    gradient_layout: str,
    number: int,
) -> tuple[Step, Step, Step]:
    needed = {name for name, tensor in inputs.items() if tensor is not None} if needed is None else needed

    def seeds(output: torch.Tensor, index: int) -> torch.Tensor:
        return laid_out(output.shape, output.dtype, gradient_layout, 90 + index + 100 * number)

    def plain(dtype: torch.dtype | None) -> dict[str, torch.Tensor | None]:
        # In plain memory of its own: the original's result must not depend on what is tested here.
        copies = {name: None if t is None else t.detach().contiguous().clone() for name, t in inputs.items()}
        return {name: t if t is None or dtype is None else t.to(dtype) for name, t in copies.items()}

    ours = Step(kernel, inputs, needed, seeds)
    theirs = Step(original, plain(None), needed, seeds)
    # The gradients are rounded to the results' dtype before they are made exact.
    rounded = [seeds(output, i).double() for i, output in enumerate(theirs.outputs)]
    return ours, theirs, Step(exact, plain(torch.float64), needed, lambda output, index: rounded[index])


def times_for(rows: Sequence[int], width: int) -> int:
    """How often a case of that size is judged as one, see :func:`assert_judged`."""
    return 8 if width < 4 or torch.Size(rows).numel() * width < 32 else 1


def second_derivatives(
    function: Function, inputs: Mapping[str, torch.Tensor], needed: Collection[str]
) -> list[torch.Tensor]:
    """The gradients of the squared norm of the gradients of a weighted sum: a use of ``create_graph=True``."""
    given = {name: t.detach().requires_grad_(name in needed) for name, t in inputs.items()}
    wrt = [given[name] for name in given if name in needed]
    total = sum((output.double() ** 2).sum() for output in tensors_of(function(**given)))
    gradients = torch.autograd.grad(total, wrt, create_graph=True)  # type: ignore[arg-type]
    return list(torch.autograd.grad(sum((g.double() ** 2).sum() for g in gradients), wrt))  # type: ignore[arg-type]


def subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """All subsets of names but the empty one; in order, since they name tests, which several processes share."""
    for bits in range(1, 1 << len(names)):
        yield tuple(name for i, name in enumerate(names) if bits >> i & 1)

"""Any call of an operator gives with our kernel what it gives natively: the same result, or the same kind of exception.

``make test-aten-long`` draws many more calls.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.aten.conftest import DEVICE, INTERPRETED, SIMULATED
from tests.aten.layouts import DTYPES, Layout, filled, layouts
from twinkle.aten import Profile, catalog
from twinkle.aten.arguments import Arguments
from twinkle.aten.harness.cases import cases
from twinkle.aten.harness.observe import Call, differences
from twinkle.aten.layouts import is_dense
from twinkle.aten.registration import active
from twinkle.aten.spec import OperatorSpec, Semantics

EXAMPLES = int(os.environ.get("TWINKLE_TEST_EXAMPLES", "40" if INTERPRETED else "150"))


@dataclass(frozen=True)
class Tensor:
    """A tensor to make, as often as it is needed.

    Attributes:
        lazy: ``"conj"`` or ``"neg"`` for one whose elements wait to be conjugated or negated.
        view: it is a view of another tensor.
        leaf: it requires a gradient.
        derived: it is a result of an operator on one that does.
        device: where it lies.
    """

    layout: Layout
    dtype: torch.dtype
    lazy: str = ""
    view: bool = False
    leaf: bool = False
    derived: bool = False
    device: str = DEVICE

    def make(self) -> torch.Tensor:
        made = filled(self.layout, self.dtype, self.device)
        if self.view:
            made = made.view_as(made)
        if self.lazy == "conj":
            made = made.conj()
        if self.lazy == "neg":
            made = torch._neg_view(made)
        if self.derived:
            return made.requires_grad_() * 1
        return made.requires_grad_() if self.leaf else made


@st.composite
def tensors(draw: Any, shape: tuple[int, ...] | None = None, written: bool = False) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    lazy = draw(st.sampled_from(["", "", "", "", "conj", "neg"]))
    if (lazy == "conj" and not dtype.is_complex) or dtype is torch.bool:
        lazy = ""
    differentiable = written and (dtype.is_floating_point or dtype.is_complex)
    gradient = draw(st.sampled_from(["", "", "", "", "leaf", "derived"])) if differentiable else ""
    device = draw(st.sampled_from([DEVICE, DEVICE, DEVICE, DEVICE, "cpu"]))
    # Which of the elements that share memory a real accelerator writes last is chance.
    overlapping = not written or ((DEVICE == "cpu" or SIMULATED) and draw(st.booleans()))
    layout, view = draw(layouts(shape, overlapping)), draw(st.booleans())
    return Tensor(layout, dtype, lazy, view, gradient == "leaf", gradient == "derived", device)


FORMATS = (None, torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)


@st.composite
def copies(draw: Any) -> list[Any]:
    to = draw(tensors(written=True))
    number = draw(st.sampled_from([None, None, None, None, 2, 0.1, True]))
    if number is not None:
        return [to, number, False]
    shape = list(to.layout[0][draw(st.integers(0, len(to.layout[0]))) :])
    for dimension in range(len(shape)):
        if draw(st.integers(0, 5)) == 0:
            shape[dimension] = draw(st.integers(0, 3))
    return [to, draw(tensors(tuple(shape))), draw(st.booleans())]


@st.composite
def lookups(draw: Any) -> list[Any]:
    """Mostly right ones; sometimes indices out of range, or a table or indices of another kind."""
    # A drawn index is below 100; one out of range would end the use of a CUDA device in this process.
    rows = draw(st.sampled_from((100, 100, 100, 100 if DEVICE == "cuda" else 4)))
    table = draw(tensors(draw(st.sampled_from(((rows, 3), (rows, 1), (rows, 3), (rows, 0), (rows,), (rows, 2, 2))))))
    indices = draw(tensors())
    if draw(st.integers(0, 4)):
        dtype = draw(st.sampled_from((torch.int64, torch.int32)))
        indices = dataclasses.replace(indices, dtype=dtype, lazy="", device=table.device)
    return [table, indices, draw(st.integers(-1, 6)), draw(st.booleans()), draw(st.booleans())]


@st.composite
def attentions(draw: Any) -> list[Any]:
    """Mostly right ones: any layouts and masks, grouped heads; sometimes what doesn't fit."""
    batch, group, heads, queries, keys, width = (draw(st.integers(1, 3)) for _ in range(6))
    many = heads * group
    shapes = [(batch, many, queries, width), (batch, heads, keys, width), (batch, heads, keys, draw(st.integers(1, 3)))]
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float64)))
    made = [dataclasses.replace(draw(tensors(shape)), lazy="") for shape in shapes]
    # PyTorch's CPU kernel gives its result the order of the query's strides, and writes beside it where two are equal.
    made[0] = dataclasses.replace(made[0], layout=draw(layouts(shapes[0])))
    if draw(st.integers(0, 4)):
        made = [dataclasses.replace(tensor, dtype=dtype, device=made[0].device) for tensor in made]
    mask = None
    if draw(st.booleans()):
        shape = draw(st.sampled_from(((batch, many, queries, keys), (1, 1, queries, keys), (keys,), (7, 7))))
        mask = dataclasses.replace(draw(tensors(shape)), dtype=draw(st.sampled_from((dtype, torch.bool))), lazy="")
        mask = dataclasses.replace(mask, device=made[0].device)
    scale = draw(st.sampled_from((None, 0.01)))
    return [*made, mask, 0.0, draw(st.booleans()), scale, group > 1 or draw(st.booleans())]


numbers = st.lists(st.integers(-1, 5), max_size=5)
options = st.tuples(st.sampled_from([None, *DTYPES]), st.sampled_from([None, torch.strided, torch.sparse_coo]))
"""The leading arguments of all that allocate: dtype and layout."""


def lone_elements() -> st.SearchStrategy[list[Any]]:
    """Mostly one element, anywhere in memory; sometimes several, or none."""
    few = st.lists(st.sampled_from((1, 1, 1, 1, 0, 2)), max_size=3).map(tuple)
    return few.flatmap(tensors).map(lambda drawn: [drawn])


def copied_as_it_is(drawn: Tensor) -> bool:
    """PyTorch's fallback to the CPU, which the simulated device has, makes a tensor with gaps contiguous before its own
    dropout sees it. A dimension of one element then has another stride than without that copy."""
    shape, strides, _ = drawn.layout
    return not SIMULATED or 1 not in shape or is_dense(shape, strides)


SHARES = (0.0, 0.3, 0.5, 1.0, 1.5, -0.1)
ARGUMENTS: dict[str, st.SearchStrategy[list[Any]]] = {
    "_local_scalar_dense": lone_elements(),
    "clone": st.tuples(tensors(), st.sampled_from(FORMATS)).map(list),
    "contiguous": st.tuples(tensors(), st.sampled_from(FORMATS[1:])).map(list),
    "copy_": copies(),
    "detach": tensors().map(lambda drawn: [drawn]),
    "detach_": tensors(written=True).map(lambda drawn: [drawn]),
    "dropout": st.tuples(tensors().filter(copied_as_it_is), st.sampled_from(SHARES), st.booleans()).map(list),
    "embedding": lookups(),
    "empty": st.tuples(numbers, options, st.sampled_from(FORMATS)).map(
        lambda drawn: [drawn[0], *drawn[1], torch.device(DEVICE), None, drawn[2]]
    ),
    "empty_like": st.tuples(tensors(), options, st.sampled_from([None, "cpu", DEVICE]), st.sampled_from(FORMATS)).map(
        lambda drawn: [drawn[0], *drawn[1], drawn[2] and torch.device(drawn[2]), None, drawn[3]]
    ),
    "empty_strided": st.tuples(numbers, numbers, options).map(
        lambda drawn: [*drawn[:2], *drawn[2], torch.device(DEVICE), None]
    ),
    "item": lone_elements(),
    "scaled_dot_product_attention": attentions(),
    "result_type": st.tuples(tensors(), tensors()).map(list),
    "type_as": st.tuples(tensors(), tensors()).map(list),
}
ROUNDS = Semantics.ROUNDS
CONTEXTS: dict[str, Callable[[], Any]] = {
    "gradients": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def arguments_of(spec: OperatorSpec) -> st.SearchStrategy[list[Any]]:
    """Those that are listed; else tensors of one shape, and the defaults."""
    if spec.name in ARGUMENTS:
        return ARGUMENTS[spec.name]

    @st.composite
    def drawn(draw: Any) -> list[Any]:
        first = draw(tensors())
        made = Arguments(spec.overload).bind((), {})
        for place, argument in enumerate(spec.overload._schema.arguments):
            if str(argument.type) == "Tensor":
                made[place] = draw(tensors(first.layout[0])) if place else first
        return made

    return drawn()


def call_of(spec: OperatorSpec, drawn: list[Any], differentiate: bool) -> Call:
    values = [value.make() if isinstance(value, Tensor) else value for value in drawn]
    return Call.of("drawn", values, spec, differentiate=differentiate)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_call(spec: OperatorSpec, chip: Profile, data: st.DataObject) -> None:
    drawn = data.draw(arguments_of(spec))
    context = data.draw(st.sampled_from(sorted(CONTEXTS)))
    differentiate = context == "gradients" and Semantics.ALLOCATES not in spec.semantics

    seen = []
    for register in (False, True):
        call = call_of(spec, drawn, differentiate)
        torch.manual_seed(0)
        registration = spec.register_a1(platform=chip.platform) if register and spec.by_design is None else None
        # Of one that is never registered it is the function that is called.
        function = spec.aten if register and spec.by_design else spec.native
        try:
            with CONTEXTS[context]():
                seen.append(call.observe(lambda values, function=function: call_operator(spec, function, values)))
        finally:
            if registration is not None:
                registration.close()
    native, ours = seen
    truth = None
    if ROUNDS in spec.semantics or spec.companion is not None:
        with CONTEXTS[context]():
            exact = call_of(spec, drawn, differentiate).in_fp64(spec, getattr(native.result, "dtype", None))
            truth = exact.observe(lambda values: call_operator(spec, spec.native, values))
    assert differences(spec, ours, native, truth) == []
    assert active() == []


def call_operator(spec: OperatorSpec, function: Callable[..., Any], values: list[Any]) -> Any:
    """As PyTorch's own Python functions do: what is None is left out."""
    names = [argument.name for argument in spec.overload._schema.arguments if argument.kwarg_only]
    leading = len(values) - len(names)
    by_name = {name: value for name, value in zip(names, values[leading:], strict=True) if value is not None}
    return function(*values[:leading], **by_name)


def test_no_arguments_are_listed_in_vain() -> None:
    assert set(ARGUMENTS) <= set(catalog.names()) and len(ARGUMENTS) >= 15


INDICES = torch.tensor([0, 3, 1], device=DEVICE)
QUERY = torch.ones(1, 2, 3, 4, device=DEVICE)


def attention(query: torch.Tensor, key: torch.Tensor, **options: Any) -> torch.Tensor:
    placed = {name: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for name, v in options.items()}
    query, key = query.to(DEVICE), key.to(DEVICE)
    return torch.nn.functional.scaled_dot_product_attention(query, key, key, **placed)


BAD: list[tuple[str, Callable[[], Any]]] = [
    ("clone", lambda: torch.ones(3, device=DEVICE).clone(memory_format=torch.channels_last)),
    ("clone", lambda: torch.ops.aten.clone("no tensor")),
    ("contiguous", lambda: torch.ones(3, 4, device=DEVICE).t().contiguous(memory_format=torch.channels_last)),
    ("contiguous", lambda: torch.ones(3, 4, device=DEVICE).t().contiguous(memory_format=torch.preserve_format)),
    ("contiguous", lambda: torch.ops.aten.contiguous([1.0])),
    ("copy_", lambda: torch.ones(3, device=DEVICE).copy_(torch.ones(4, device=DEVICE))),
    ("copy_", lambda: torch.ones(1, device=DEVICE).expand(3).copy_(torch.ones(3, device=DEVICE))),
    ("copy_", lambda: torch.ops.aten.copy_(torch.ones(3, device=DEVICE), None)),
    ("detach", lambda: torch.ops.aten.detach(3)),
    ("dropout", lambda: torch.ops.aten.dropout(torch.ones(3, device=DEVICE), 1.5, True)),
    ("dropout", lambda: torch.ops.aten.dropout(torch.ones(3, device=DEVICE), -0.1, True)),
    ("dropout", lambda: torch.ops.aten.dropout(torch.ones(3, device=DEVICE), float("nan"), True)),
    ("dropout", lambda: torch.ops.aten.dropout(2.0, 0.5, True)),
    ("embedding", lambda: torch.nn.functional.embedding(INDICES.float(), torch.ones(9, 2, device=DEVICE))),
    ("embedding", lambda: torch.ops.aten.embedding(torch.ones(9, device=DEVICE), INDICES)),
    ("scaled_dot_product_attention", lambda: attention(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 5))),
    ("scaled_dot_product_attention", lambda: attention(QUERY, QUERY, attn_mask=torch.ones(7, 7))),
    ("scaled_dot_product_attention", lambda: attention(QUERY, QUERY.half())),
    ("empty_like", lambda: torch.empty_like(torch.ones(3, device=DEVICE), memory_format=torch.channels_last)),
    ("empty_like", lambda: torch.empty_like(2)),
    ("empty_strided", lambda: torch.empty_strided((3,), (-1,), device=DEVICE)),
    ("empty_strided", lambda: torch.empty_strided((3, 3), (1,), device=DEVICE)),
    ("empty_strided", lambda: torch.empty_strided((2**62, 2**62), (2**62, 1), device=DEVICE)),
    ("empty_strided", lambda: torch.empty_strided((2**45,), (1,), device=DEVICE)),
    ("empty_strided", lambda: torch.ops.aten.empty_strided(["3"], [1], device=torch.device(DEVICE))),
    ("item", lambda: torch.ones(2, device=DEVICE).item()),
    ("item", lambda: torch.ones(0, device=DEVICE).item()),
    ("_local_scalar_dense", lambda: torch.ops.aten._local_scalar_dense(torch.ones(0, device=DEVICE))),
    ("type_as", lambda: torch.ones(2, device=DEVICE).type_as(torch.float16)),
    ("type_as", lambda: torch.ones(2, device=DEVICE).type_as(3.0)),
]


if DEVICE != "cuda":  # there it is an assertion on the device: see test_embedding.py. A p of 1.5 isn't looked at there.
    BAD += [
        ("embedding", lambda: torch.nn.functional.embedding(INDICES, torch.ones(3, 2, device=DEVICE))),
        ("embedding", lambda: torch.nn.functional.embedding(INDICES - 2, torch.ones(9, 2, device=DEVICE))),
        ("scaled_dot_product_attention", lambda: attention(QUERY, QUERY, dropout_p=1.5)),
    ]


@pytest.mark.parametrize(("name", "call"), BAD)
def test_bad_input_raises_what_it_raises_natively(name: str, call: Callable[[], Any], chip: Profile) -> None:
    """Native's exception with native's message, and a note that names the operator and whose kernel it was."""
    with pytest.raises(Exception) as native:
        call()
    spec = catalog.operator(name)
    with spec.register_a1(platform=chip.platform) as registration, pytest.raises(native.type) as ours:
        call()
    assert type(ours.value) is native.type
    assert first_sentence(ours.value) == first_sentence(native.value)
    if "Expected a proper Tensor but got None" not in str(ours.value):  # which no kernel is asked about
        assert name in "".join([str(ours.value), *getattr(ours.value, "__notes__", ())])
    assert registration.counts.kernel == 0 and active() == []
    values = next(cases(spec)).values(chip.device)
    assert call_operator(spec, spec.native, values) is not None, "the operator works as before"


def first_sentence(error: BaseException) -> str:
    """Without how much memory was free, and PyTorch's own stack."""
    return str(error).splitlines()[0].partition(". ")[0]


def test_the_note_says_whose_kernel_raised(clone: OperatorSpec, chip: Profile) -> None:
    x = torch.ones(3, device=DEVICE)
    with clone.register_a1(platform=chip.platform) as registration:
        with pytest.raises(RuntimeError) as ours:
            x.clone(memory_format=torch.channels_last)
        with pytest.raises(RuntimeError) as natives:
            x[:0].clone(memory_format=torch.channels_last)
    assert ours.value.__notes__ == [f"raised by aten::clone, by twinkle's {registration.level} kernel"]
    assert natives.value.__notes__ == [
        "raised by aten::clone, by PyTorch's own kernel, since twinkle's doesn't take the call: empty"
    ]
    assert (registration.counts.errors, registration.counts.fallbacks) == (1, {"empty": 1})


@pytest.mark.parametrize("number", [0.1, True, 2**53 + 1, 1 + 2j])
def test_a_number_for_a_tensor_keeps_all_its_digits(chip: Profile, number: complex) -> None:
    dtype = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}[type(number)]
    with catalog.operator("copy_").register_a1(platform=chip.platform) as registration:
        to = torch.zeros(2, dtype=dtype, device=chip.device)
        torch.ops.aten.copy_.default(to, number, False)
        assert registration.counts.fallbacks["number"] == 1
    assert to.cpu().tolist() == [number, number]

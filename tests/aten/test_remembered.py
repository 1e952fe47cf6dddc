"""What is found out about a call's layout is found out once; what depends on more is asked at each call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.aten.conftest import DEVICE
from twinkle.aten import Condition, Profile, catalog, install
from twinkle.aten.arguments import Arguments, layout
from twinkle.aten.harness import op_level
from twinkle.aten.harness.remembered import kinds_of_calls, lazy_pairs, looks_at_more
from twinkle.aten.serving import Serving
from twinkle.aten.spec import OperatorSpec, Semantics
from twinkle.memory import Memory
from twinkle.platforms import PLATFORMS
from twinkle.reasons import Counts


def asked(spec: OperatorSpec, **options: Any) -> tuple[OperatorSpec, list[Any]]:
    """The operator with a condition that notes what it is asked about, and holds of what has three rows."""
    seen: list[Any] = []

    def holds(self: torch.Tensor, *_: Any) -> bool:
        seen.append(self)
        return self.shape[0] == 3

    condition = Condition("rows", "there are three rows", holds, lambda device: (torch.ones(2, device=device), None))
    return dataclasses.replace(spec, conditions=(*spec.conditions, dataclasses.replace(condition, **options))), seen


@pytest.mark.parametrize(("each_time", "times"), [(False, 2), (True, 6)])
def test_how_often_a_condition_is_asked(each_time: bool, times: int, clone: OperatorSpec, chip: Profile) -> None:
    spec, seen = asked(clone, each_time=each_time)
    with spec.register_a1(platform=chip.platform) as registration:
        for number in range(3):
            for rows in (2, 3):
                torch.full((rows, 4), float(number), device=DEVICE).clone()
        assert (registration.counts.kernel, dict(registration.counts.fallbacks)) == (3, {"rows": 3})
    assert len(seen) == times


DIFFER: dict[str, Callable[[], list[Any]]] = {
    "shapes": lambda: [torch.ones(n, device=DEVICE) for n in (2, 3)],
    "strides": lambda: [torch.ones(6, device=DEVICE)[::step][:3] for step in (1, 2)],
    "dtypes": lambda: [torch.ones(3, dtype=dtype, device=DEVICE) for dtype in (torch.int32, torch.float32)],
    "devices": lambda: [torch.ones(3, device=device) for device in (DEVICE, "meta")],
    "types": lambda: [torch.ones(3, device=DEVICE), torch.nn.Parameter(torch.ones(3, device=DEVICE))],
    "kinds of memory": lambda: [torch.zeros(3, 3), torch.zeros(3, 3).to_sparse(), torch.zeros(3, 3).to_mkldnn()],
    "numbers": lambda: [1, 1.0, True, 2, None, "1"],
    "lists": lambda: [[], [1], [1, 2], [2, 1]],
    "words": lambda: [torch.float32, torch.strided, torch.contiguous_format, torch.device("cpu")],
}


@pytest.mark.parametrize("what", DIFFER)
def test_layouts_are_told_apart(what: str) -> None:
    keys = [layout((value,), {}) for value in DIFFER[what]()]
    assert None not in keys and len(set(keys)) == len(keys)
    assert keys == [layout((value,), {}) for value in DIFFER[what]()], "as those of other tensors like them"


def test_places_and_names_are_told_apart() -> None:
    assert len({layout((1, 2), {}), layout((2, 1), {}), layout((1,), {"p": 2}), layout((1,), {"q": 2})}) == 4


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3).as_subclass(Subclass),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.eye(3).to_sparse_csr(),
        torch.Generator(),
        [torch.ones(2)],
        [True],
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.filterwarnings("ignore:.*(prototype|beta):UserWarning")
def test_what_does_not_tell_its_layout_is_not_remembered(value: Any) -> None:
    assert layout((value,), {}) is None


@pytest.mark.filterwarnings("ignore:.*(prototype|beta):UserWarning")
def test_what_is_not_remembered_is_found_out_each_time(clone: OperatorSpec) -> None:
    serving = Serving(clone, PLATFORMS["cpu"], "torch")
    sparse = torch.eye(3).to_sparse_csr()
    calls = {"subclass": torch.ones(3).as_subclass(Subclass), "layout": sparse, None: torch.ones(3)}
    for _ in range(2):
        for reason, tensor in calls.items():
            assert serving.lasting_refusal((tensor,), {}) == reason


def test_no_more_layouts_are_remembered_than_allowed(
    clone: OperatorSpec, chip: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Memory, "MOST", 3)
    with clone.register_a1(platform=chip.platform) as registration:
        for rows in range(1, 9):
            x = torch.rand(rows, device=DEVICE)
            assert torch.equal(x.clone(), x)
        assert registration.counts.kernel == 8 and len(registration._traffic.serving._known) <= 3


def test_a_call_of_a_known_layout_whose_numbers_do_not_fit(chip: Profile) -> None:
    table = torch.rand(3, 4, device=DEVICE)
    spec = catalog.operator("embedding")
    if DEVICE == "cuda":
        pytest.skip("it would end the use of the device in this process")
    with spec.register_a1(platform=chip.platform) as registration:
        for indices in ([0, 2], [1, 1]):
            torch.nn.functional.embedding(torch.tensor(indices, device=DEVICE), table)
        assert registration.counts.kernel == 2
        with pytest.raises(IndexError):
            torch.nn.functional.embedding(torch.tensor([0, 3], device=DEVICE), table)
        assert registration.counts.kernel == 2


def test_lazy_bits_and_shared_memory_are_looked_at_each_time(chip: Profile) -> None:
    memory = torch.arange(8.0, device=DEVICE)
    to, source = torch.zeros(4, device=DEVICE), memory[4:].clone()
    with catalog.operator("copy_").register_a1(platform=chip.platform) as registration:
        for served, call in (
            ("kernel", lambda: to.copy_(source)),
            ("lazy-bits", lambda: to.copy_(torch._neg_view(source))),
            ("same-memory", lambda: memory[:4].copy_(memory[4:])),
        ):
            registration.count_in(Counts())
            call()
            counts = registration.counts
            assert served in ({"kernel"} if counts.kernel else set(counts.fallbacks)), served
    assert to.tolist() == [-4.0, -5.0, -6.0, -7.0] and memory[:4].tolist() == source.tolist()


# --- conditions that should say so ------------------------------------------------------------------------------------


def test_a_condition_that_looks_at_elements_must_say_so(clone: OperatorSpec, chip: Profile) -> None:
    numbers = Condition(
        "not-a-number",
        "every element is a number",
        lambda self, _: not self.isnan().any(),
        lambda device: (torch.full((3, 4), float("nan"), device=device), None),
    )
    device = torch.device(DEVICE)
    assert looks_at_more(numbers, device)
    assert not looks_at_more(dataclasses.replace(numbers, each_time=True), device)
    spec = dataclasses.replace(clone, conditions=(*clone.conditions, numbers))
    outcome = op_level.run(spec, chip)
    text = "the condition 'not-a-number' looks at more than the layout, so it has to say each_time=True"
    assert any(text in problem for problem in outcome.problems)


def test_all_conditions_of_the_library_say_so(spec: OperatorSpec) -> None:
    for each in spec.parts:
        conditions = [
            *each.conditions,
            *each.routing,
            *(c for kernel in each.kernels.values() for c in kernel.conditions),
        ]
        kinds = kinds_of_calls(each, torch.device(DEVICE))
        assert [c.code for c in conditions if looks_at_more(c, torch.device(DEVICE), kinds)] == []
        may_be = [i for i, argument in enumerate(each.overload._schema.arguments) if "Tensor" in str(argument.type)]
        assert all(any(isinstance(call[i], torch.Tensor) for call in kinds) for i in may_be), "each was tried"


def lazy_calls(spec: OperatorSpec, chip: Profile) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Calls with one tensor whose elements aren't what its memory holds, each beside one that is laid out alike."""
    for n, call in enumerate(kinds_of_calls(spec, torch.device(chip.device))):
        for place, value in enumerate(call):
            for one, other in lazy_pairs(value) if isinstance(value, torch.Tensor) else ():
                plain, lazy = ([*call[:place], t, *call[place + 1 :]] for t in (one, other))
                yield f"call {n}, {spec.overload._schema.arguments[place].name}", plain, lazy


def test_a_call_with_lazy_bits_after_one_like_it_without(registrable: OperatorSpec, chip: Profile) -> None:
    """Which is taken, and remembered. The kernel takes the other one of the same elements only if it knows of such."""
    for spec in registrable.parts:
        operator = functools.partial(Arguments(spec.overload).call, spec.native)
        for name, plain, lazy in lazy_calls(spec, chip):
            expected = result_or_error(operator, plain)
            with spec.register_a1(platform=chip.platform) as registration:
                result_or_error(operator, plain)
                registration.count_in(Counts())
                ours = result_or_error(operator, lazy)
            counts = registration.counts
            # Native isn't judged: of a query that is zero and has no memory, its attention reads some all the same.
            assert counts.errors == 0 and (not counts.kernel or alike(spec, ours, expected)), name


def result_or_error(operator: Callable[[list[Any]], Any], values: list[Any]) -> Any:
    try:
        return operator(values)
    except Exception as error:
        return type(error)


def alike(spec: OperatorSpec, one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return bool(one == other)
    if spec.semantics & (Semantics.RANDOM | Semantics.ALLOCATES):
        return one.shape == other.shape
    rounding = 1e-2 if one.dtype.itemsize == 2 else 1e-5
    return torch.allclose(one, other, rtol=rounding, atol=rounding, equal_nan=True)


@pytest.mark.parametrize("each_time", [False, True])
def test_a_condition_that_raises_leaves_the_call_to_native(each_time: bool, clone: OperatorSpec, chip: Profile) -> None:
    """As one does whose sizes are no numbers; the reason tells it apart from one that doesn't hold."""

    def holds(self: torch.Tensor, *_: Any) -> bool:
        raise AttributeError("no such number")

    condition = Condition(
        "rows", "there are rows", holds, lambda device: (torch.ones(2, device=device), None), each_time=each_time
    )
    spec = dataclasses.replace(clone, conditions=(*clone.conditions, condition))
    with spec.register_a1(platform=chip.platform) as registration:
        assert torch.equal(torch.ones(3, device=DEVICE).clone(), torch.ones(3, device=DEVICE))
    counts = registration.counts
    assert (counts.kernel, counts.errors, counts.fallbacks) == (0, 0, {"rows-raised": 1})


def test_sizes_that_are_symbols(clone: OperatorSpec, chip: Profile) -> None:
    """Of a program that is being made: they can't be remembered, and a kernel's questions would become guards of it."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    environment = ShapeEnv()
    size = environment.create_unbacked_symint()
    serving = Serving(clone, chip.found)
    x = torch.empty_strided((size, 2), (2, 1), device="meta")
    for _ in range(2):
        assert serving.lasting_refusal((x,), {}) == "symbolic"
    assert not environment.guards


@pytest.mark.skipif(DEVICE != "cpu", reason="detach changes what PyTorch itself can do, on every device alike")
def test_a_program_of_symbolic_sizes_is_made(chip: Profile) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x.t().contiguous()).clone()

    names = ["clone", "contiguous", "copy_", "silu", "empty_strided", "type_as"]
    native = make_fx(program, tracing_mode="symbolic")(torch.randn(3, 4)).code
    with install(names, platform=chip.platform) as installed:
        assert make_fx(program, tracing_mode="symbolic")(torch.randn(3, 4)).code == native
    assert all(one.counts.errors == 0 for one in installed.registrations.values())

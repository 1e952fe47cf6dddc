"""``<operator>_aten``: a call that PyTorch refuses is refused in its words, and no other is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.aten.conftest import DEVICE
from twinkle.aten.arguments import Arguments
from twinkle.aten.harness.cases import cases
from twinkle.aten.spec import OperatorSpec

Call = tuple[tuple[Any, ...], dict[str, Any]]


def usual(spec: OperatorSpec) -> Call:
    """Arguments that the kernel takes, as they are given."""
    call: list[Call] = []
    Arguments(spec.overload).call(lambda *args, **kwargs: call.append((args, kwargs)), first(spec))
    return call[0]


def first(spec: OperatorSpec) -> list[Any]:
    return next(cases(spec, seeds=1)).values(DEVICE)


def misused(spec: OperatorSpec) -> dict[str, Call]:
    """By what is wrong with them."""
    args, kwargs = usual(spec)
    declared = [argument.name for argument in spec.overload._schema.arguments]
    wrong: dict[str, Call] = {
        "none": ((), {}),
        "one too many": ((*args, *kwargs.values(), 1), {}),
        "an unknown name": (args, {**kwargs, "foo": 1}),
        "one twice": (args, {**kwargs, declared[0]: args[0]}),
    }
    if kwargs:
        wrong["by position what has a name only"] = ((*args, *kwargs.values()), {})
    for name in declared:
        for value in ("nonsense", 1.5, object()):
            by_name = {**dict(zip(declared, args, strict=False)), **kwargs, name: value}
            wrong[f"{name}={value if isinstance(value, str | float) else 'object()'}"] = ((), by_name)
    return wrong


def outcome(function: Callable[..., Any], call: Call) -> Any:
    args, kwargs = call
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        # Where an object lies is no part of what is said.
        return type(error), str(error).splitlines()[0].partition(" at 0x")[0]
    return type(result), getattr(result, "shape", None), getattr(result, "dtype", None)


def test_a_misused_call_is_pytorchs(spec: OperatorSpec) -> None:
    refused = 0
    for what, call in misused(spec).items():
        expected = outcome(spec.native, call)
        assert outcome(spec.aten, call) == expected, what
        refused += issubclass(expected[0], Exception)
    assert refused >= 4


def test_all_arguments_may_be_given_by_name(spec: OperatorSpec) -> None:
    """``self`` too, which is what most operators call their first."""
    names = [argument.name for argument in spec.overload._schema.arguments]
    by_name = dict(zip(names, first(spec), strict=True))
    assert outcome(spec.aten, ((), by_name)) == outcome(spec.native, usual(spec))


def test_numbers_arrive_as_the_schema_has_them() -> None:
    """PyTorch takes any number for a bool; a compiled kernel chooses by its type."""
    from ops.scaled_dot_product_attention.register import SPEC

    arguments = Arguments(SPEC.overload)
    given = arguments.of_declared_kinds(arguments.bind((1, 2, 3, None, 0, 1.5), {"scale": None, "enable_gqa": 0}))
    assert given == [1, 2, 3, None, 0.0, True, None, False]
    assert [type(value) for value in given[4:6]] == [float, bool]


def test_a_tensor_for_a_number() -> None:
    """PyTorch takes one without dimensions."""
    from ops.dropout import dropout_aten
    from ops.scaled_dot_product_attention import scaled_dot_product_attention_aten

    query, half = torch.randn(1, 1, 4, 16, device=DEVICE), torch.tensor(0.5)
    result = scaled_dot_product_attention_aten(query, query, query, scale=half)
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, query, scale=0.5)
    torch.testing.assert_close(result, expected)
    assert set(dropout_aten(torch.ones(64, device=DEVICE), half, True).tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("padding", ["a", 1.5, None])
def test_a_number_of_another_kind(padding: Any) -> None:
    """The kernel compares it with indices, and would find none equal."""
    from ops.embedding import embedding_aten

    weight, indices = torch.ones(3, 4, device=DEVICE), torch.tensor([0], device=DEVICE)
    with pytest.raises(RuntimeError, match="Expected a value of type 'int' for argument 'padding_idx'"):
        embedding_aten(weight, indices, padding)

"""An operator's inputs, from ``goldendata/inputs_spec.yaml``: the same on every machine and in every process.

    operator: clone
    seeds_per_case: 3
    dtypes: [float32, int64]
    cases:
      - name: transposed
        arguments:
          self: {shape: [4097, 7], strides: [1, 4097], offset: 3}

A mapping with ``shape`` is a tensor: ``strides`` (contiguous when left out) and ``offset`` in elements, ``dtype`` (the
case's when left out), ``values`` (``normal``, ``few`` or ``many`` integers, ``zeros``, ``large``, ``special``,
``edges`` or ``poison``). Anything else is the argument itself; a name of ``torch`` may stand for a memory format, a
dtype or a layout, ``"{dtype}"`` for the case's. Arguments that are left out have their defaults, a ``device`` is the
one that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from twinkle.aten.arguments import Arguments
from twinkle.aten.harness.fills import FILLS
from twinkle.aten.harness.listed import NAMED, listed_inputs, listed_timed
from twinkle.aten.layouts import span
from twinkle.aten.spec import OperatorSpec


@dataclass(frozen=True)
class Case:
    """One call of an operator.

    Attributes:
        name: case, dtype, kind of values and seed; what the numbers are made from.
        dtype: that of the tensors which name none.
        described: argument name -> its description, in the schema's order.
        gradient: small enough to have its gradients compared with finite differences.
        kept_in: the file of the golden data that has it, together with its other seeds.
    """

    name: str
    overload: torch._ops.OpOverload
    dtype: torch.dtype
    described: dict[str, Any]
    gradient: bool = False
    kept_in: str = ""

    def values(
        self, device: torch.device | str = "cpu", tensors: Mapping[str, torch.Tensor] | None = None
    ) -> list[Any]:
        """All arguments in the schema's order; new tensors at each call.

        Args:
            device: where the tensors are to lie.
            tensors: CPU tensors, by argument, to be copied instead of made from the description.
        """
        given = tensors or {}
        named = {
            name: copied(given[name], device) if name in given else self._value(name, described, device)
            for name, described in self.described.items()
        }
        arguments = Arguments(self.overload)
        if "device" in arguments.names:
            named["device"] = torch.device(device)
        return arguments.bind((), named)

    def _value(self, name: str, described: Any, device: torch.device | str) -> Any:
        if isinstance(described, dict):
            return _tensor(f"{self.name}/{name}", self.dtype, device, **described)
        if described == "{dtype}":
            return self.dtype
        named = getattr(torch, described, None) if isinstance(described, str) else None
        return named if isinstance(named, tuple(NAMED.values())) else described


def cases(spec: OperatorSpec, seeds: int | None = None) -> Iterator[Case]:
    """All cases of an operator.

    Args:
        seeds: how many of each; as many as the file says when left out.

    Raises:
        InputsError: the file is another operator's, has no cases, or one that can't be understood.
    """
    listed = listed_inputs(spec)
    for case in listed["cases"]:
        described = _in_order(spec, case["arguments"])
        for dtype in case["dtypes"]:
            for seed in range(seeds or listed["seeds_per_case"]):
                name = f"{spec.name}/{case['name']}/{dtype}/{seed}"
                kept_in = f"{case['name']}.{dtype}.pt".replace(" ", "_")
                gradient = bool(case.get("gradient"))
                yield Case(name, spec.overload, getattr(torch, dtype), described, gradient, kept_in)


def benchmark_cases(spec: OperatorSpec, size: str) -> Iterator[Case]:
    """The calls of an operator that are timed: ``benchmark.yaml``, each with its arguments in three sizes.

    Args:
        size: ``accelerator``, ``cpu``, or ``quick``: too small to say anything about speed.

    Raises:
        InputsError: the file is another operator's, has no cases, or one that can't be understood.
    """
    for case in listed_timed(spec):
        for dtype in case["dtypes"]:
            name = f"{spec.name}/{case['name']}"
            yield Case(name, spec.overload, getattr(torch, dtype), _in_order(spec, case[size]))


def _in_order(spec: OperatorSpec, arguments: dict[str, Any]) -> dict[str, Any]:
    return {a.name: arguments[a.name] for a in spec.overload._schema.arguments if a.name in arguments}


def _tensor(
    name: str,
    default: torch.dtype,
    device: torch.device | str,
    *,
    shape: list[int],
    strides: list[int] | None = None,
    offset: int | None = None,
    dtype: str | None = None,
    values: str | None = None,
) -> torch.Tensor:
    """A view of memory that is filled throughout, so that what lies between and beyond the elements is known too."""
    kind = default if dtype is None else getattr(torch, dtype)
    strides_of = torch.empty(shape, device="meta").stride() if strides is None else tuple(strides)
    memory = FILLS[values or "normal"](name, (offset or 0) + span(shape, strides_of) + _MARGIN, kind)
    return laid_out(memory.to(device), shape, strides_of, offset or 0)


_MARGIN = 5


def copied(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor in memory of its own on a device, what lies between and beyond its elements included."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return laid_out(memory.to(device, copy=True), tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def laid_out(memory: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    """A tensor in some memory, which is no view of anything."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return memory.as_strided(shape, strides, offset)

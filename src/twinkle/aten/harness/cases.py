"""An operator's inputs, from ``goldendata/inputs_spec.yaml``: the same on every machine and in every process.

    operator: clone
    seeds_per_case: 3
    dtypes: [float32, int64]
    cases:
      - name: transposed
        arguments:
          self: {shape: [4097, 7], strides: [1, 4097], offset: 3}

A mapping with ``shape`` is a tensor: ``strides`` (contiguous when left out) and ``offset`` in elements, ``dtype`` (the
case's when left out), ``values`` (``normal``, ``few`` integers, ``zeros``, ``large``, ``special``, ``edges`` or
``poison``). Anything else is the argument itself; a name of ``torch`` may stand for a memory format, a dtype or a
layout, ``"{dtype}"`` for the case's. Arguments that are left out have their defaults, a ``device`` is the one that is
asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from twinkle.aten.arguments import Arguments
from twinkle.aten.spec import OperatorSpec

TORCH_NAMES = (torch.memory_format, torch.dtype, torch.layout)


@dataclass(frozen=True)
class Case:
    """One call of an operator.

    Attributes:
        name: case, dtype, kind of values and seed; what the numbers are made from.
        dtype: that of the tensors which name none.
        described: argument name -> its description, in the schema's order.
        gradient: small enough to have its gradients compared with finite differences.
    """

    name: str
    overload: torch._ops.OpOverload
    dtype: torch.dtype
    described: dict[str, Any]
    gradient: bool = False

    def values(self, device: torch.device | str = "cpu") -> list[Any]:
        """All arguments in the schema's order; new tensors at each call."""
        named = {name: self._value(name, described, device) for name, described in self.described.items()}
        if any(argument.name == "device" for argument in self.overload._schema.arguments):
            named["device"] = torch.device(device)
        return Arguments(self.overload).bind((), named)

    def _value(self, name: str, described: Any, device: torch.device | str) -> Any:
        if isinstance(described, dict):
            return _tensor(f"{self.name}/{name}", self.dtype, device, **described)
        if described == "{dtype}":
            return self.dtype
        named = getattr(torch, described, None) if isinstance(described, str) else None
        return named if isinstance(named, TORCH_NAMES) else described


def cases(spec: OperatorSpec, seeds: int | None = None) -> Iterator[Case]:
    """All cases of an operator.

    Args:
        seeds: how many of each; as many as the file says when left out.

    Raises:
        ValueError: the file is another operator's, or has no cases.
    """
    import yaml

    file = spec.home.folder / "goldendata" / "inputs_spec.yaml"
    listed = yaml.safe_load(file.read_text(encoding="utf-8"))
    if listed["operator"] != spec.name or not listed["cases"]:
        raise ValueError(f"{file}: no cases of {spec.name}")
    names = [argument.name for argument in spec.overload._schema.arguments]
    for case in listed["cases"]:
        described = {name: case["arguments"][name] for name in names if name in case["arguments"]}
        for dtype in case.get("dtypes", listed["dtypes"]):
            for seed in range(seeds or listed["seeds_per_case"]):
                name = f"{spec.name}/{case['name']}/{dtype}/{seed}"
                yield Case(name, spec.overload, getattr(torch, dtype), described, case.get("gradient", False))


def _tensor(
    name: str,
    default: torch.dtype,
    device: torch.device | str,
    *,
    shape: list[int],
    strides: list[int] | None = None,
    offset: int = 0,
    dtype: str | None = None,
    values: str = "normal",
) -> torch.Tensor:
    """A view of memory that is filled throughout, so that what lies between and beyond the elements is known too."""
    kind = default if dtype is None else getattr(torch, dtype)
    laid_out = torch.empty(shape, device="meta").stride() if strides is None else tuple(strides)
    reach = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, laid_out, strict=True))
    memory = _FILLS[values](offset + reach + _MARGIN, kind, generator(name))
    memory = memory.to(device)
    with torch._C._AutoDispatchBelowADInplaceOrView():  # a tensor of its own, no view
        return memory.as_strided(shape, laid_out, offset)


_MARGIN = 5


def generator(name: str) -> torch.Generator:
    """Seeded by the name's digest: Python's own hash differs from process to process."""
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))


def _normal(size: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(size, dtype=wide, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, (size,), generator=generator).to(dtype)


def _few(size: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 4, (size,), generator=generator).to(dtype)


def _zeros(size: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype)


def _large(size: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return _normal(size, dtype, generator).sign() * torch.finfo(dtype).max
    return torch.full((size,), torch.iinfo(dtype).max, dtype=dtype)


def _special(size: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Not a number, infinities, the negative zero, the smallest number."""
    few = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, torch.finfo(dtype).smallest_normal])
    return few[torch.randint(0, len(few), (size,), generator=generator)].to(dtype)


def _edges(size: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """As :func:`_special`, without what is not a number: there are many, and a conversion may give any."""
    few = torch.tensor([float("inf"), -float("inf"), -0.0, torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max])
    return few[torch.randint(0, len(few), (size,), generator=generator)].to(dtype)


def _poison(size: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """What a result holds before it is written."""
    pattern = 0x01 if dtype is torch.bool else 0xA5  # other bytes are no booleans
    return torch.full((size * torch.empty(0, dtype=dtype).element_size(),), pattern, dtype=torch.uint8).view(dtype)


_FILLS = {
    "normal": _normal,
    "few": _few,
    "zeros": _zeros,
    "large": _large,
    "special": _special,
    "edges": _edges,
    "poison": _poison,
}

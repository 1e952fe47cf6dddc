"""Calls with a number in a tensor's place, ``x * 0.5``, of operators that take one.

Such a number doesn't decide the result's dtype as a tensor would, least of all beside a tensor without dimensions. An
author lists calls of tensors, so nothing else comes upon these.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from twinkle.aten.arguments import Arguments
from twinkle.aten.harness.cases import cases
from twinkle.aten.spec import OperatorSpec, Semantics
from twinkle.naming import dtype_name

NUMBERS = (True, 3, 0.1, 0.5j)
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
"""Of the tensors beside them."""


def number_calls(spec: OperatorSpec, device: torch.device) -> Iterator[tuple[str, list[Any]]]:
    """The operator's first case with a number for one of several tensors, where PyTorch takes that.

    Must be asked while the operator isn't registered.

    Returns:
        What reports call it, and the arguments in the schema's order: the tensors, which hold twos, have each of some
        dtypes, and the case's shapes or none.
    """
    case = next(iter(cases(spec, seeds=1)))
    names = [argument.name for argument in spec.overload._schema.arguments]
    given = case.values(device)
    tensors = [place for place, value in enumerate(given) if isinstance(value, torch.Tensor)]
    if len(tensors) < 2:
        return
    call = Arguments(spec.overload).call
    for place in tensors[Semantics.IN_PLACE in spec.semantics :]:
        for number, dtype, shaped in itertools.product(NUMBERS, DTYPES, (True, False)):

            def arguments(place: int = place, number: Any = number, dtype: Any = dtype, shaped: Any = shaped) -> Any:
                made = list(given)
                for each in tensors:
                    shape = given[each].shape if shaped else ()
                    made[each] = torch.full(shape, 2, dtype=dtype, device=device)
                made[place] = number
                return made

            try:
                call(spec.native, arguments())
            except Exception:  # this operator takes no number there, or not beside such a tensor
                continue
            beside = f"{dtype_name(dtype)}{'' if shaped else ' without dimensions'}"
            yield f"{case.name}, {names[place]} the number {number} beside {beside}", arguments()

"""What ``aten::embedding`` is, and which calls our kernels take."""

import functools

import torch

from twinkle.aten import Condition, Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import INDEX_DTYPES, dimensions, one_device, tensor
from twinkle.aten.routes import Work


def _call(weight, indices):
    return weight, indices, -1, False, False


def _table(device, rows=3):
    return torch.ones(rows, 4, device=device)


def _some(device):
    return torch.tensor([[1, 0], [2, 2]], device=device)


def _looked_up(weight):
    return _call(weight, _some(weight.device))


def _in_range(weight, indices, *_):
    if weight.is_cuda:
        return True  # where the kernel itself looks, as PyTorch's does: asking here would wait for the device
    return bool((indices >= 0).all()) and bool((indices < weight.shape[0]).all())


def _out_of_range(device):
    if device.type == "cuda":
        raise NotImplementedError("it would end the use of the device in this process")
    return _call(_table(device), torch.tensor([0, 3], device=device))


_SHORT, _UNEVEN = "short rows", "uneven rows"
_LENGTHS = {"rows of 8 KB": 2**13, "rows of 4 KB": 2**12, "rows of 2 KB": 2**11, _SHORT: 2**9}
"""A call's kind -> the bytes of a row at which it is timed, and from which on a row is of it; shorter ones are short.
Triton moves several elements at a time only where they lie side by side and each row begins and ends at a multiple of
16 elements: the others, of any length, are uneven."""


def _size(weight, indices, *_):
    return indices.numel() * weight.shape[1] * weight.itemsize


def _kind(weight, *_):
    width, (row_stride, column_stride) = weight.size(1), weight.stride()
    if column_stride != 1 or row_stride % 16 or width % 16:
        return _UNEVEN
    length = width * weight.itemsize
    return next((kind for kind, least in _LENGTHS.items() if least <= length), _SHORT)


def _sample(length, gap, elements, device, dtype):
    """Of a table that no cache holds: rows of so many bytes, with a gap of so many elements after each."""
    rows, width = 2**28 // length, length // dtype.itemsize
    weight = torch.ones(rows, width + gap, dtype=dtype, device=device)[:, :width]
    return _call(weight, torch.randint(rows, (max(1, elements // width),), device=device))


SPEC = OperatorSpec(
    schema=(
        "embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False,"
        " bool sparse=False) -> Tensor"
    ),
    home=Home.of(__name__, __file__),
    semantics=Semantics.PURE,
    kernels={
        "triton": Kernel(
            "kernel.triton_level:embedding_triton",
            (
                Condition(
                    "index-range",
                    "every index is a row of the table (on a CUDA device the kernel looks)",
                    _in_range,
                    _out_of_range,
                    each_time=True,
                ),
            ),
        ),
        "torch": Kernel("kernel.torch_level:embedding_torch"),
    },
    conditions=(
        *tensor(0, "weight", lambda t: _call(t, torch.tensor([1, 0], device=t.device))),
        *tensor(1, "indices", lambda t: _call(_table(t.device), t.long() if t.is_floating_point() else t)),
        Condition(
            "indices",
            "indices are int64 or int32",
            lambda weight, indices, *_: indices.dtype in INDEX_DTYPES,
            lambda device: _call(_table(device), torch.ones(2, device=device)),
        ),
        Condition(
            "dtype",
            "weight isn't complex",
            lambda weight, *_: not weight.is_complex(),
            lambda device: _call(_table(device).to(torch.complex64), _some(device)),
        ),
        dimensions(0, "weight", 2, _looked_up),
        one_device((0, 1), _looked_up),
    ),
    work=Work(
        _size,
        _kind,
        samples={
            **{kind: functools.partial(_sample, length, 0) for kind, length in _LENGTHS.items()},
            _UNEVEN: functools.partial(_sample, 2**11, 1),
        },
    ),
    pullback="kernel.torch_level:embedding_pullback",
    shape_only=(0,),
    derivative="backward.register:SPEC",
    reference="reference:embedding_reference",
)
embedding_aten = SPEC.aten
register_a1 = SPEC.register_a1

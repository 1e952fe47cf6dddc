"""What ``aten::embedding`` is, and which calls our kernels take."""

import torch

from twinkle.aten import Condition, Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import another_device, tensor
from twinkle.aten.routes import ANY, Work

_INTEGERS = (torch.int64, torch.int32)


def _call(weight, indices):
    return weight, indices, -1, False, False


def _table(device, rows=3):
    return torch.ones(rows, 4, device=device)


def _some(device):
    return torch.tensor([[1, 0], [2, 2]], device=device)


def _in_range(weight, indices, *_):
    if weight.is_cuda:
        return True  # where the kernel itself looks, as PyTorch's does: asking here would wait for the device
    return bool((indices >= 0).all()) and bool((indices < weight.shape[0]).all())


def _out_of_range(device):
    if device.type == "cuda":
        raise NotImplementedError("it would end the use of the device in this process")
    return _call(_table(device), torch.tensor([0, 3], device=device))


def _elements(weight, indices, *_):
    return indices.numel() * weight.size(1)


def _sample(elements, device, dtype):
    rows, width = 131072, 1024  # more than any cache holds
    weight = torch.ones(rows, width, dtype=dtype, device=device)
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
            lambda weight, indices, *_: indices.dtype in _INTEGERS,
            lambda device: _call(_table(device), torch.ones(2, device=device)),
        ),
        Condition(
            "dtype",
            "weight isn't complex",
            lambda weight, *_: not weight.is_complex(),
            lambda device: _call(_table(device).to(torch.complex64), _some(device)),
        ),
        Condition(
            "rank",
            "weight has two dimensions",
            lambda weight, *_: weight.dim() == 2,
            lambda device: _call(torch.ones(3, device=device), _some(device)),
        ),
        Condition(
            "device",
            "both are on one device",
            lambda weight, indices, *_: weight.device == indices.device,
            lambda device: _call(_table(device), _some(another_device(device))),
        ),
    ),
    work=Work(_elements, samples={ANY: _sample}),
    pullback="kernel.torch_level:embedding_pullback",
    shape_only=(0,),
    derivative="backward.register:SPEC",
    reference="reference:embedding_reference",
)
embedding_aten = SPEC.aten
register_a1 = SPEC.register_a1

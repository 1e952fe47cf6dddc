"""What ``aten::empty_like`` is, and which calls our kernel takes."""

import torch

from twinkle.aten import Condition, Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import ordinary_memory, tensor
from twinkle.aten.layouts import takes_format


def _like(tensor, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return tensor, dtype, layout, device, pin_memory, memory_format


def _ones(device):
    return torch.ones(3, 4, device=device)


SPEC = OperatorSpec(
    schema=(
        "empty_like(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None,"
        " bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor"
    ),
    home=Home.of(__name__, __file__),
    semantics=Semantics.ALLOCATES,
    kernels={"torch": Kernel("kernel.torch_level:empty_like_torch")},
    conditions=(
        *tensor(0, "self", _like, without=("empty",)),
        *ordinary_memory(1, lambda device, **options: _like(_ones(device), **options)),
        Condition(
            "device",
            "device is that of self or left out",
            lambda self, dtype, layout, device, *_: device is None or device.type == self.device.type,
            lambda device: _like(_ones(device), device=torch.device("meta")),
        ),
        Condition(
            "format",
            "memory_format is one that a tensor of that rank can have",
            lambda self, *rest: takes_format(self.dim(), rest[-1]),
            lambda device: _like(_ones(device), memory_format=torch.channels_last),
        ),
    ),
    reference="reference:empty_like_reference",
)
empty_like_aten = SPEC.aten
register_a1 = SPEC.register_a1

"""What ``aten::embedding_dense_backward`` is, and which calls our kernels take."""

import torch

from twinkle.aten import Condition, Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import INDEX_DTYPES, floating, one_device, rounded, tensor


def _call(grad, indices, padding_idx=-1, rows=3):
    return grad, indices, rows, padding_idx, False


def _of(grad):
    """A call with this gradient.

    One without elements gets no rows instead of no columns: PyTorch's own CUDA kernel reads memory that isn't its own
    where a row has none (2.11).
    """
    grad = grad if grad.numel() else grad.reshape(0, 3)
    return _call(grad, torch.tensor([1, 0, 1], device=grad.device)[: grad.shape[0]])


SPEC = OperatorSpec(
    schema=(
        "embedding_dense_backward(Tensor grad_output, Tensor indices, SymInt num_weights, SymInt padding_idx,"
        " bool scale_grad_by_freq) -> Tensor"
    ),
    home=Home.of(__name__, __file__),
    semantics=Semantics.ROUNDS,
    kernels={
        "triton": Kernel(
            "kernel.triton_level:embedding_dense_backward_triton",
            (rounded(0, _of),),
        ),
        "torch": Kernel("kernel.torch_level:embedding_dense_backward_torch"),
    },
    conditions=(
        *tensor(0, "grad_output", _of),
        *tensor(1, "indices", lambda t: _call(torch.ones(2, 4, device=t.device), t), without=("layout", "lazy-bits")),
        floating(0, _of),
        one_device((0, 1), _of),
        Condition(
            "indices",
            "indices are int64 or int32, and grad_output has a row for each",
            lambda grad, indices, *_: (
                indices.dtype in INDEX_DTYPES and grad.shape[:-1] == indices.shape and grad.dim() > 0
            ),
            lambda device: _call(torch.ones(2, 4, device=device), torch.ones(2, dtype=torch.int16, device=device)),
        ),
    ),
    pullback="kernel.torch_level:embedding_dense_backward_pullback",
    shape_only=(0,),
    reference="reference:embedding_dense_backward_reference",
)

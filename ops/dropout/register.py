"""What ``aten::dropout`` is, and which calls our kernels take."""

import torch

from twinkle.aten import Condition, Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import dense, floating, rounded, tensor
from twinkle.aten.routes import ANY, Work

SPEC = OperatorSpec(
    schema="dropout(Tensor input, float p, bool train) -> Tensor",
    home=Home.of(__name__, __file__),
    semantics=Semantics.RANDOM | Semantics.MAY_ALIAS,
    kernels={
        "triton": Kernel(
            "kernel.triton_level:dropout_triton",
            (dense(0, "input", lambda t: (t, 0.5, True)), rounded(0, lambda t: (t, 0.5, True))),
            with_pullback="kernel.triton_level:dropout_triton_with_pullback",
        ),
        "torch": Kernel(
            "kernel.torch_level:dropout_torch", with_pullback="kernel.torch_level:dropout_torch_with_pullback"
        ),
    },
    conditions=(
        *tensor(0, "input", lambda t: (t, 0.5, True)),
        floating(0, lambda t: (t, 0.5, True)),
        Condition(
            "p",
            "0 < p < 1",
            lambda input, p, train: 0 < p < 1,
            lambda device: (torch.ones(3, device=device), 1.5, True),
        ),
        Condition(
            "not-training",
            "train is True",
            lambda input, p, train: train,
            lambda device: (torch.ones(3, device=device), 0.5, False),
        ),
    ),
    work=Work(
        samples={ANY: lambda elements, device, dtype: (torch.ones(elements, dtype=dtype, device=device), 0.1, True)}
    ),
    reference="reference:dropout_reference",
    judge="reference:judge",
    model={"attention_dropout": 0.1, "attn_implementation": "eager"},
)
dropout_aten = SPEC.aten
register_a1 = SPEC.register_a1

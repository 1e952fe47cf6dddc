"""Which code the fused norms are put into, and what becomes of a call where somebody has changed a module since."""

from __future__ import annotations

import functools
import inspect
import linecache
import types
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from tests.support import fused_lookalikes as lookalikes
from tests.support.models import clean_process  # noqa: F401
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.ops.fused_norms import rewriting
from twinkle.kernel.report import Row, report
from twinkle.kernel.undo import unkernelize

QK = {"fused_qk": KernelChoice("qk_norm_rotary", ("loopback",))}
ADD = {"fused_add_norm": KernelChoice("add_rms_norm", ("loopback",))}


def row(module: nn.Module) -> Row:
    """That of the one that is installed of the two."""
    (found,) = (row for row in report(module).rows if row.target in {**QK, **ADD})
    return found


# --- code -------------------------------------------------------------------------------------------------------------


def test_the_code_that_it_is_for() -> None:
    for module, inputs, mapping in (
        (lookalikes.Attention(), lookalikes.attention_inputs(), QK),
        (lookalikes.Layer(), (torch.randn(2, 3, 16),), ADD),
    ):
        expected = module(*inputs)
        kernelize(module, mapping)
        torch.testing.assert_close(module(*inputs), expected)
        assert (row(module).state, row(module).calls) == ("installed", 1), row(module).why()
        unkernelize(module)


def test_decorators_stay() -> None:
    """Those of transformers 5.24: one takes an argument by its old name, another checkpoints a layer."""
    module, x = lookalikes.DecoratedLayer(), torch.randn(2, 16)
    signature, expected = inspect.signature(module.forward), module(old=x)
    kernelize(module, ADD)
    torch.testing.assert_close(module(old=x), expected)
    assert (row(module).calls, module.acted) == (1, 2)
    assert inspect.signature(module.forward) == signature
    unkernelize(module)
    assert module.forward.__func__ is lookalikes.DecoratedLayer.forward  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("cls", "why"), lookalikes.ATTENTIONS.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_attention_in_other_code_is_left_alone(cls: Any, why: str) -> None:
    module, inputs = cls(), lookalikes.attention_inputs()
    expected = module(*inputs)
    kernelize(module, QK)
    assert row(module).state == "refused" and why in row(module).why()
    assert all(map(torch.equal, module(*inputs), expected))


@pytest.mark.parametrize("cls", lookalikes.LAYERS)
def test_layers_in_other_code_are_left_alone(cls: Any) -> None:
    module = kernelize(cls(), ADD)
    assert row(module).state == "refused"
    assert "doesn't add to a residual and normalise the sum right after" in row(module).why()


def test_code_whose_source_is_another_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was changed on disk since it was imported, and what never lay there."""
    forward: Any = lookalikes.Attention.forward
    file = forward.__code__.co_filename
    assert not isinstance(rewriting.body_of(forward), rewriting.Reason)
    assert isinstance(rewriting.body_of(torch.add), rewriting.Reason)
    edited = "".join(linecache.getlines(file)).replace("q, k = rotate(q, k, cos, sin)\n        return F.", "return F.")
    for lines in (edited.splitlines(keepends=True), ["not python at all ("], []):
        rewriting._trees.cache_clear()
        monkeypatch.setattr(linecache, "getlines", lambda *_, lines=lines: lines)
        module = kernelize(lookalikes.Attention(), QK)
        assert row(module).state == "refused" and "isn't there, or isn't what runs" in row(module).why()
    rewriting._trees.cache_clear()


def test_errors_and_signatures_are_the_models_own() -> None:
    import traceback

    module = lookalikes.Layer()
    signature = inspect.signature(module.forward)
    kernelize(module, ADD)
    assert inspect.signature(module.forward) == signature and module.forward.__name__ == "forward"
    torch.testing.assert_close(module(torch.ones(1, 16), scale=0.5), module(torch.ones(1, 16)))
    with pytest.raises(RuntimeError) as raised:
        module(torch.ones(1, 17))
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert any(frame.filename == lookalikes.__file__ and "self.mixer(x)" in str(frame.line) for frame in frames)
    unkernelize(module)


# --- another kernel for the same forward ------------------------------------------------------------------------------

TARGET = "tests.support.fused_lookalikes.Attention.forward"


def zeros(self: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)


def test_two_kernels_for_one_forward_in_one_mapping() -> None:
    """The first gets it, and the other's row says so, whichever is which."""
    for mapping in ({**QK, TARGET: zeros}, {TARGET: zeros, **QK}):
        module = kernelize(lookalikes.Attention(), mapping)
        first, second = (report(module).row(key) for key in mapping)
        module(*lookalikes.attention_inputs())
        assert (first.state, first.calls) == ("installed", 1)
        assert second.state == "refused" and f"already carries the kernel of {first.target}" in second.why()
        assert unkernelize(module).not_undone == ()


def test_a_later_kernel_for_that_forward() -> None:
    """It takes its place, so that its row is gone."""
    module = kernelize(kernelize(lookalikes.Attention(), QK), {TARGET: zeros})
    assert [row.target for row in report(module).rows] == [TARGET]
    assert not module(*lookalikes.attention_inputs()).any()
    assert unkernelize(module).not_undone == () and type(module) is lookalikes.Attention


# --- calls ------------------------------------------------------------------------------------------------------------


class Changed(nn.Module):
    """A norm of somebody else's."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.norm(x)


def doubled(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return tuple(2 * r for r in result) if isinstance(result, tuple) else 2 * result

    return call


def with_a_hook(module: Any, monkeypatch: Any) -> None:
    module.q_norm.register_forward_hook(lambda _, args, output: 2 * output)


def with_a_hook_before(module: Any, monkeypatch: Any) -> None:
    module.k_norm.register_forward_pre_hook(lambda _, args: (args[0] + 1,))


def with_a_backward_hook(module: Any, monkeypatch: Any) -> None:
    module.k_norm.register_full_backward_hook(lambda _, grads, output: (2 * grads[0],))


def with_a_forward_of_its_own(module: Any, monkeypatch: Any) -> None:
    module.q_norm.forward = types.MethodType(doubled(type(module.q_norm).forward), module.q_norm)


def with_another_norm(module: Any, monkeypatch: Any) -> None:
    module.k_norm = Changed(module.k_norm)


def with_a_patched_class(module: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(lookalikes.Norm, "forward", doubled(lookalikes.Norm.forward))


def with_another_rotation(module: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(lookalikes, "rotate", doubled(lookalikes.rotate))


def with_a_kernel_of_the_users_own(module: Any, monkeypatch: Any) -> None:
    class Mine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x * self.weight

    kernelize(module, {lookalikes.Norm: Mine})


def with_a_rotation_of_the_users_own(module: Any, monkeypatch: Any) -> None:
    original = lookalikes.rotate

    def mine(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
        return original(2 * q, 3 * k, cos, sin, unsqueeze_dim)

    kernelize(module, {"tests.support.fused_lookalikes.rotate": mine})


def with_hooks_for_all(module: Any, monkeypatch: Any) -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda m, args, output: 2 * output if isinstance(m, lookalikes.Norm) else None
    )
    monkeypatch.setattr(module, "handle_", handle, raising=False)


CHANGES = {
    with_a_hook: "hooks",
    with_a_hook_before: "hooks",
    with_a_backward_hook: "hooks",
    with_a_forward_of_its_own: "forward of its own",
    with_another_norm: "when the kernel was installed",
    with_a_patched_class: "when the kernel was installed",
    with_another_rotation: "the rotary function is not the one",
    with_a_kernel_of_the_users_own: "when the kernel was installed",
    with_a_rotation_of_the_users_own: "the rotary function is not the one",
    with_hooks_for_all: "hooks for all modules",
}


@pytest.fixture
def no_hooks_left() -> Iterator[None]:
    yield
    torch.nn.modules.module._global_forward_hooks.clear()


@pytest.mark.parametrize(("change", "why"), CHANGES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_somebody_changes_later_is_not_passed_over(
    change: Any, why: str, monkeypatch: pytest.MonkeyPatch, no_hooks_left: None
) -> None:
    """The modules and functions are called then, whatever they do by now."""

    def run(fused: bool) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        module, (x, cos, sin) = lookalikes.Attention(), lookalikes.attention_inputs()
        if fused:
            kernelize(module, QK)
        with monkeypatch.context() as patched:
            change(module, patched)
            result = module(x.requires_grad_(), cos, sin)
            torch.nn.modules.module._global_forward_hooks.clear()
        if fused:
            (reason,) = row(module).fallbacks
            assert row(module).calls == 0 and why in reason
        unkernelize(module)
        return module, result.detach(), torch.autograd.grad(result.square().sum(), x)[0]

    theirs, ours = run(False), run(True)
    assert torch.equal(ours[1], theirs[1]) and torch.equal(ours[2], theirs[2])
    plain = lookalikes.Attention()
    plain.load_state_dict({k.replace("norm.norm", "norm"): v for k, v in ours[0].state_dict().items()})
    assert change is with_a_backward_hook or not torch.allclose(ours[1], plain(*lookalikes.attention_inputs()))


def test_weights_and_eps_are_read_at_each_call() -> None:
    module, inputs = lookalikes.Attention(), lookalikes.attention_inputs()
    kernelize(module, QK)
    twin = lookalikes.Attention()
    module.q_norm.weight = nn.Parameter(torch.rand(16))
    module.k_norm.eps = 0.5
    nn.utils.parametrize.register_parametrization(module.k_norm, "weight", nn.Softplus())
    twin.load_state_dict({**module.state_dict(), "k_norm.weight": module.k_norm.weight}, strict=False)
    twin.k_norm.eps = 0.5
    torch.testing.assert_close(module(*inputs), twin(*inputs))
    assert row(module).calls == 1
    unkernelize(module)


def test_a_norm_that_is_taken_away() -> None:
    """The original says what it has to say about that."""
    module = kernelize(lookalikes.Attention(), QK)
    module.q_norm = None  # type: ignore[assignment]
    with pytest.raises(TypeError, match="not callable"):
        module(*lookalikes.attention_inputs())
    unkernelize(module)

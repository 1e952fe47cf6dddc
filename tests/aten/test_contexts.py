"""Where calls come from: transforms, checkpoints, other threads and processes, a compiler."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tests.aten.conftest import DEVICE, INTERPRETED
from twinkle.aten import Profile, catalog
from twinkle.aten.harness.compare import same_bits
from twinkle.aten.spec import OperatorSpec

USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": lambda x: x.clone(),
    "copy_": lambda x: (x.new_zeros(x.shape) * 1).copy_(x),
    "contiguous": lambda x: x.transpose(-1, -2).contiguous(),
    "type_as": lambda x: x.bfloat16().type_as(x),
}
"""Differentiable functions of a matrix, each of which calls its operator."""


@pytest.fixture(params=USES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def both(spec: OperatorSpec, chip: Profile, work: Callable[[], Any]) -> tuple[Any, Any, dict[str, int]]:
    """What some work gives natively and with the operator's kernel, and who served the calls of the latter."""
    torch.manual_seed(0)
    native = work()
    torch.manual_seed(0)
    with spec.register_a1(platform=chip.platform) as registration:
        ours = work()
    return native, ours, {"kernel": registration.counts.kernel, **registration.counts.fallbacks}


def matrix() -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def test_the_gradient_and_that_of_the_gradient(name: str, chip: Profile) -> None:
    def work() -> list[torch.Tensor]:
        x = matrix().requires_grad_()
        (first,) = torch.autograd.grad((USES[name](x) ** 3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return [first, second]

    native, ours, served = both(catalog.operator(name), chip, work)
    assert all(map(same_bits, ours, native)) and served["kernel"] > 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint(name: str, chip: Profile, reentrant: bool) -> None:
    def work() -> torch.Tensor | None:
        x = matrix().requires_grad_()
        # What is computed after the operator is needed, so it is computed again.
        checkpoint(lambda t: USES[name](t).exp().sin(), x * 2, use_reentrant=reentrant).sum().backward()
        return x.grad

    native, ours, served = both(catalog.operator(name), chip, work)
    assert same_bits(ours, native) and served["kernel"] >= 2


@pytest.mark.parametrize("view", [False, True])
def test_a_leaf_is_not_written_before_the_exception(chip: Profile, view: bool) -> None:
    leaf = torch.zeros(3, 4, device=DEVICE, requires_grad=True)
    with catalog.operator("copy_").register_a1(platform=chip.platform):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            (leaf[1:] if view else leaf).copy_(torch.ones(4, device=DEVICE))
        with torch.no_grad():
            assert not leaf.any()
            leaf.copy_(torch.ones(4, device=DEVICE))
    assert leaf.all() and leaf._version == 1


TRANSFORMS: dict[str, Callable[[Callable[..., torch.Tensor], torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda t: (f(t) ** 2).sum())(x),
    "vmap": lambda f, x: torch.vmap(f)(torch.stack([x, x + 1])),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda t: (f(t) ** 2).sum()))(torch.stack([x, x + 1])),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x + 1,))[1],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform(name: str, chip: Profile, transform: str) -> None:
    native, ours, served = both(catalog.operator(name), chip, lambda: TRANSFORMS[transform](USES[name], matrix()))
    assert same_bits(ours, native)
    assert set(served) <= {"kernel", "functorch", "forward-mode-ad", "device", "number", "lazy-bits", "subclass"}


def test_an_autograd_router_leaves_transforms_to_native(chip: Profile) -> None:
    work = lambda: TRANSFORMS["grad"](USES["contiguous"], matrix())  # noqa: E731
    assert both(catalog.operator("contiguous"), chip, work)[2].get("functorch", 0) > 0


def test_forward_mode(name: str, chip: Profile) -> None:
    def work() -> torch.Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(matrix(), torch.ones(4, 3, device=DEVICE))
            return forward_ad.unpack_dual(USES[name](dual)).tangent

    native, ours, _ = both(catalog.operator(name), chip, work)
    assert same_bits(ours, native)


def test_inference_tensors(name: str, chip: Profile) -> None:
    with torch.inference_mode():
        x = matrix()

    def work() -> torch.Tensor:
        with torch.inference_mode():
            return USES[name](x)

    native, ours, served = both(catalog.operator(name), chip, work)
    assert same_bits(ours, native) and ours.is_inference() and served["kernel"] > 0


def test_a_dispatch_mode_sees_the_call(chip: Profile) -> None:
    """At an autograd key, before the mode: native serves, so that the mode sees what it always sees."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def work() -> list[str]:
        with Seen() as seen:
            matrix().t().contiguous()
        return seen.names

    native, ours, served = both(catalog.operator("contiguous"), chip, work)
    assert ours == native and served.get("dispatch-mode", 0) > 0


def test_fake_tensors(chip: Profile) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def work() -> torch.Size:
        with FakeTensorMode():
            return torch.empty(4, 3, device=DEVICE).t().contiguous().clone().shape

    for name in ("clone", "contiguous"):
        native, ours, served = both(catalog.operator(name), chip, work)
        assert ours == native and "kernel" not in {who for who, n in served.items() if n}


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter has one state for all threads")
def test_another_thread(name: str, chip: Profile) -> None:
    with catalog.operator(name).register_a1(platform=chip.platform) as registration:
        thread = threading.Thread(target=lambda: USES[name](matrix()))
        thread.start()
        thread.join()
        assert registration.counts.kernel > 0


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="says nothing about kernels")
@pytest.mark.multiprocess
def test_processes(chip: Profile, environment: dict[str, str], tmp_path: Path) -> None:
    """A forked child has the registration; a spawned one hasn't until it registers itself."""
    code = f"""
import multiprocessing
import torch
from ops.clone import register_a1

def count(queue, again):
    counter = {{}}
    if again:
        register_a1(counter=counter, platform={chip.platform!r})
    before = SHARED.get("n", 0)
    torch.ones(3, device={DEVICE!r}).clone()
    queue.put(counter.get("n", 0) if again else SHARED.get("n", 0) - before)

SHARED = {{}}

def main():
    register_a1(counter=SHARED, platform={chip.platform!r})
    for method, again in (("fork", False), ("spawn", False), ("spawn", True)):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        child = context.Process(target=count, args=(queue, again))
        child.start()
        print(method, again, queue.get())
        child.join()

if __name__ == "__main__":
    main()
"""
    program = tmp_path / "program.py"
    program.write_text(code)
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fork False 1\nspawn False 0\nspawn True 1\n"

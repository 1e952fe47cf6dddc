"""Where calls come from: transforms, checkpoints, other threads and processes, a compiler."""

from __future__ import annotations

import contextlib
import functools
import json
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
from tests.aten.uses import USES
from twinkle.aten import Profile, catalog
from twinkle.aten.arguments import Arguments
from twinkle.aten.harness.cases import cases
from twinkle.aten.harness.compare import same_bits
from twinkle.aten.spec import OperatorSpec, Semantics


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


def same(spec: OperatorSpec, ours: Any, native: Any, served: dict[str, int]) -> bool:
    """Bits; of random numbers that aren't native's, the shape. What raised is its exception's type."""
    if isinstance(native, torch.Tensor) and Semantics.RANDOM in spec.semantics and served["kernel"]:
        return ours.shape == native.shape and bool(ours.isfinite().all())
    if isinstance(native, torch.Tensor) and Semantics.ROUNDS in spec.semantics:
        return torch.allclose(ours, native, atol=1e-5)
    return same_bits(ours, native) if isinstance(native, torch.Tensor) else ours == native


def test_every_operator_has_a_use() -> None:
    assert sorted(USES) == [name for name in catalog.names() if catalog.operator(name).by_design is None]


def matrix() -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def test_the_gradient_and_that_of_the_gradient(name: str, chip: Profile) -> None:
    def work() -> list[Any]:
        x = matrix().requires_grad_()
        (first,) = torch.autograd.grad((USES[name](x) ** 3).sum(), x, create_graph=True)
        return [first.detach(), or_error(lambda: torch.autograd.grad(first.sum(), x)[0])]

    spec = catalog.operator(name)
    native, ours, served = both(spec, chip, work)
    assert same(spec, ours[0], native[0], served) and served["kernel"] > 0
    # PyTorch has no second derivative of some, but we have.
    assert same(spec, ours[1], native[1], served) or (name, native[1]) == ATTENTION_ONCE


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint(name: str, chip: Profile, reentrant: bool) -> None:
    def work() -> torch.Tensor | None:
        x = matrix().requires_grad_()
        # What is computed after the operator is needed, so it is computed again.
        checkpoint(lambda t: USES[name](t).exp().sin(), x * 2, use_reentrant=reentrant).sum().backward()
        return x.grad

    spec = catalog.operator(name)
    native, ours, served = both(spec, chip, work)
    assert same(spec, ours, native, served) and served["kernel"] >= 2


CONTEXTS = {"gradients": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("leaf", [False, True])
def test_a_call_counts_once(registrable: OperatorSpec, chip: Profile, context: str, leaf: bool) -> None:
    """Also where the kernel stands at two keys, one above the other."""
    spec = registrable
    case = next(case for case in cases(spec, seeds=1) if case.dtype is torch.float32)
    with CONTEXTS[context]():
        values = case.values(chip.device)
    with CONTEXTS[context](), spec.register_a1(platform=chip.platform) as registration:
        if leaf and context != "inference_mode":
            for value in values[Semantics.IN_PLACE in spec.semantics :]:
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    value.requires_grad_()
        Arguments(spec.overload).call(spec.overload, values)
        assert (registration.counter["n"], registration.counts.kernel) == (1, 1)


def test_a_call_that_native_serves_counts_once(registrable: OperatorSpec, chip: Profile) -> None:
    spec = registrable
    for condition in spec.conditions:
        with contextlib.suppress(NotImplementedError):  # the device has no such tensors
            values = list(condition.beyond(torch.device(chip.device)))
            with spec.register_a1(platform=chip.platform) as registration:
                with contextlib.suppress(RuntimeError, ValueError):  # what native makes of it
                    Arguments(spec.overload).call(spec.overload, values)
                reached = registration.counter["n"]
                assert reached <= 1 and registration.counts.kernel == 0
                # Looked at after what can be said of the layout, as that a kernel converts no complex numbers.
                every = (*spec.conditions, *spec.kernels[registration.level].conditions)
                codes = {condition.code} if condition.code != "lazy-bits" else {c.code for c in every}
                assert sum(registration.counts.fallbacks.values()) == reached
                assert set(registration.counts.fallbacks) <= codes, "lazy bits may be resolved before"


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


def test_an_inference_tensor_is_left_to_native_outside(chip: Profile) -> None:
    with torch.inference_mode():
        made = torch.zeros(3, device=DEVICE)
    with catalog.operator("copy_").register_a1(platform=chip.platform) as registration:
        with pytest.raises(RuntimeError, match="^Inplace update to inference tensor outside InferenceMode"):
            made.copy_(torch.ones(3, device=DEVICE))
        if registration.keys != (chip.found.dispatch_key,):
            assert registration.counts.fallbacks["inference-tensor"] == 1
        with torch.inference_mode():
            assert made.copy_(torch.ones(3, device=DEVICE)).all() and registration.counts.kernel >= 1


ATTENTION_ONCE = ("scaled_dot_product_attention", RuntimeError)
ATTENTION_FORWARD = ("scaled_dot_product_attention", NotImplementedError)
"""What PyTorch's own can't on some devices: be differentiated twice, and forward."""

TRANSFORMS: dict[str, Callable[[Callable[..., torch.Tensor], torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda t: (f(t) ** 2).sum())(x),
    "vmap": lambda f, x: torch.vmap(f)(torch.stack([x, x + 1])),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda t: (f(t) ** 2).sum()))(torch.stack([x, x + 1])),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x + 1,))[1],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
}


def or_error(work: Callable[[], Any]) -> Any:
    """A result, or the type of the exception: what is random, or read on the host, can't simply be mapped over."""
    try:
        return work()
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform(name: str, chip: Profile, transform: str) -> None:
    spec = catalog.operator(name)
    work = lambda: or_error(lambda: TRANSFORMS[transform](USES[name], matrix()))  # noqa: E731
    native, ours, served = both(spec, chip, work)
    assert same(spec, ours, native, served)
    if (name, native) == ATTENTION_FORWARD:
        return
    unmapped = name in ("dropout", "item", "_local_scalar_dense") and transform.startswith("vmap")
    assert isinstance(native, torch.Tensor) is not unmapped
    assert set(served) <= {
        "kernel",
        "functorch",
        "forward-mode-ad",
        "device",
        "number",
        "lazy-bits",
        "subclass",
        "functional",
    }


@pytest.mark.parametrize("synced", [False, True])
def test_a_wrapper_of_functionalization(name: str, chip: Profile, synced: bool) -> None:
    """As AOTAutograd makes them, outside of a transform: what it stands for has the elements."""

    def work() -> torch.Tensor:
        x = torch._to_functional_tensor(matrix())
        used = [torch.full((4, 3), 7.0, device=DEVICE) for _ in range(50)]
        del used  # what isn't written holds sevens
        torch._enable_functionalization(reapply_views=True)
        try:
            result = USES[name](x)
            if synced:
                torch._sync(result)
            return torch._from_functional_tensor(result)
        finally:
            torch._disable_functionalization()

    spec = catalog.operator(name)
    native, ours, served = both(spec, chip, lambda: or_error(work))
    assert same(spec, ours, native, served)


def test_an_autograd_router_leaves_transforms_to_native(chip: Profile) -> None:
    work = lambda: TRANSFORMS["grad"](USES["contiguous"], matrix())  # noqa: E731
    assert both(catalog.operator("contiguous"), chip, work)[2].get("functorch", 0) > 0


def test_forward_mode(name: str, chip: Profile) -> None:
    def work() -> torch.Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(matrix(), torch.ones(4, 3, device=DEVICE))
            return forward_ad.unpack_dual(USES[name](dual)).tangent

    spec = catalog.operator(name)
    native, ours, served = both(spec, chip, lambda: or_error(work))
    assert (name, native) == ATTENTION_FORWARD or (
        isinstance(native, torch.Tensor) and same(spec, ours, native, served)
    )


def test_inference_tensors(name: str, chip: Profile) -> None:
    with torch.inference_mode():
        x = matrix()

    def work() -> torch.Tensor:
        with torch.inference_mode():
            return USES[name](x)

    spec = catalog.operator(name)
    native, ours, served = both(spec, chip, work)
    assert same(spec, ours, native, served) and ours.is_inference() and served["kernel"] > 0


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("copy_", lambda x: torch.zeros_like(x).copy_(x.expand(4, 3))),
        ("item", lambda x: x * x.sum().item()),
        ("_local_scalar_dense", lambda x: x * x.sum().item()),
    ],
)
def test_a_traced_call(name: str, work: Callable[[torch.Tensor], torch.Tensor], chip: Profile) -> None:
    """The tracer makes nodes of sizes and numbers: those that a kernel asks for would be some of the program's."""
    x = torch.randn(4, 3, device=DEVICE)

    def traced() -> list[str]:
        return [node.kind() for node in torch.jit.trace(work, x).graph.nodes()]

    native, ours, served = both(catalog.operator(name), chip, traced)
    assert ours == native and served["jit-trace"] > 0


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter has one state for all threads")
def test_another_thread(name: str, chip: Profile) -> None:
    with catalog.operator(name).register_a1(platform=chip.platform) as registration:
        thread = threading.Thread(target=lambda: USES[name](matrix()))
        thread.start()
        thread.join()
        assert registration.counts.kernel > 0


# --- processes --------------------------------------------------------------------------------------------------------


METHODS = [("fork", False), ("spawn", False), ("spawn", True)]
if DEVICE == "cuda":  # a forked child can't use it, whatever is registered
    METHODS.remove(("fork", False))


@pytest.mark.skipif(INTERPRETED, reason="says nothing about kernels")
@pytest.mark.multiprocess
def test_processes(chip: Profile, environment: dict[str, str], tmp_path: Path) -> None:
    """Every operator: a forked child has the registration; a spawned one hasn't until it registers itself."""
    code = f"""
import json
import multiprocessing
import torch
from tests.aten.uses import USES
from twinkle.aten import install
from twinkle.aten.registration import active
from twinkle.aten.routes import every_size

def served(queue, again):
    if again:
        with every_size():
            install(platform={chip.platform!r})
    x = torch.randn(4, 3, device={DEVICE!r})
    before = {{registration.operator: registration.counts.kernel for registration in active()}}
    for use in USES.values():
        use(x)
    counts = {{r.operator: r.counts.kernel - before[r.operator] for r in active()}}
    queue.put(sorted(name for name, n in counts.items() if n))

def main():
    with every_size():
        install(platform={chip.platform!r})
    for method, again in {METHODS}:
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        child = context.Process(target=served, args=(queue, again))
        child.start()
        print(json.dumps(queue.get()))
        child.join()

if __name__ == "__main__":
    main()
"""
    program = tmp_path / "program.py"
    program.write_text(code)
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    every = [name for name in USES if catalog.operator(name).caution is None]
    expected = {("fork", False): every, ("spawn", False): [], ("spawn", True): every}
    assert [json.loads(line) for line in done.stdout.splitlines()] == [expected[method] for method in METHODS]


def test_meta_tensors_are_left_alone(clone: OperatorSpec, chip: Profile) -> None:
    """They have no data, and no kernel of ours is asked; where natively something raises, it raises."""
    on = {device: torch.ones(4, 3, device=device) for device in (DEVICE, "meta")}
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("clone", lambda: on["meta"].t().clone()),
        ("contiguous", lambda: on["meta"].t().contiguous()),
        ("dropout", lambda: torch.nn.functional.dropout(on["meta"], 0.5)),
        ("copy_", lambda: on["meta"].clone().copy_(on[DEVICE])),
        ("copy_", lambda: on[DEVICE].copy_(on["meta"])),
        ("empty_strided", lambda: torch.empty_strided((4, 3), (1, 4), device="meta")),
    ]
    for name, call in calls:
        native = or_error(call)
        with catalog.operator(name).register_a1(platform=chip.platform) as registration:
            ours = or_error(call)
        assert registration.counts.kernel == 0 and registration.counts.errors == 0
        if isinstance(native, type):
            assert ours is native
        else:
            assert (ours.device, ours.shape, ours.stride()) == (native.device, native.shape, native.stride())


@pytest.mark.parametrize("dtype", [torch.int1, torch.uint4, torch.int7])
def test_dtypes_that_are_names_alone(dtype: torch.dtype, chip: Profile) -> None:
    """Few kernels of PyTorch take them: whatever moved their bytes would give results where there are none natively."""

    def made() -> torch.Tensor:
        return torch.arange(12, dtype=torch.uint8, device=DEVICE).view(4, 3).view(dtype)

    calls: dict[str, Callable[[], Any]] = {
        "clone": lambda: made().clone().view(torch.uint8),
        "contiguous": lambda: made().t().contiguous().view(torch.uint8),
        "copy_": lambda: made()[:2].copy_(made()[2:]).view(torch.uint8),
        "embedding": lambda: torch.nn.functional.embedding(torch.tensor([1, 0], device=DEVICE), made()),
    }
    for name, call in calls.items():
        native, ours, served = both(catalog.operator(name), chip, functools.partial(or_error, call))
        assert served["kernel"] == 0 and served["layout"] == 1, name
        assert same_bits(ours, native) if isinstance(native, torch.Tensor) else ours is native, name

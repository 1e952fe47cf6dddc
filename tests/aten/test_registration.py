"""Life of a registration: what it counts, who keeps it, and that nothing of it is left."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import resource
import subprocess
import sys
import threading
import weakref
from copy import deepcopy
from typing import Any

import pytest
import torch

from tests.aten.conftest import DEVICE, INTERPRETED, TRITON
from tests.aten.uses import USES
from twinkle.aten import NotRegistrableError, Profile, RegistrationError, catalog, install
from twinkle.aten import registration as registration_module
from twinkle.aten.arguments import Arguments
from twinkle.aten.harness.cases import cases
from twinkle.aten.harness.observe import Call, Seen, differences
from twinkle.aten.registration import active
from twinkle.aten.spec import WITHOUT_GRADIENT, OperatorSpec, Semantics

TOGETHER = [name for name in USES if catalog.operator(name).caution is None]
"""What ``install("all")`` registers."""


def kernel_at(spec: OperatorSpec, key: str) -> str:
    return repr(torch.library.get_kernel(spec.overload, key))


def test_the_default_key_with_a_platform(clone: OperatorSpec, chip: Profile) -> None:
    counter = {"n": 5}
    x = torch.randn(3, 4, device=DEVICE)
    with clone.register_a1(counter=counter, platform=chip.platform) as registration:
        assert torch.equal(x.clone(), x)
        assert counter["n"] == 6
        assert (registration.counts.kernel, registration.counts.errors) == (1, 0)
        assert registration.level == ("triton" if TRITON else "torch")
        assert active() == [registration] and not registration.closed
    assert registration.closed and active() == []


def test_a_refused_registration_leaves_the_counter_alone(clone: OperatorSpec, chip: Profile) -> None:
    class ReadOnly(dict[str, int]):
        def __setitem__(self, name: str, value: int) -> None:
            raise ValueError("it can't be written")

    counter: dict[str, int] = {}
    with clone.register_a1(platform=chip.platform), pytest.raises(RegistrationError, match="registered already"):
        clone.register_a1(counter=counter, platform=chip.platform)
    assert counter == {}
    with pytest.raises(RegistrationError, match="writing the counter's 'n' raised ValueError: it can't be") as error:
        clone.register_a1(counter=ReadOnly(n=3), platform=chip.platform)
    assert error.value.code == "bad-argument" and active() == []


@pytest.mark.parametrize("made", [{}, {"n": None}, {"n": "much"}])
def test_a_call_never_fails_of_counting(made: dict[str, Any], clone: OperatorSpec, chip: Profile) -> None:
    """Whatever the counter's owner does to it meanwhile."""
    counter: dict[str, Any] = {}
    with clone.register_a1(counter=counter, platform=chip.platform):
        counter.clear()
        counter.update(made)
        for expected in (1, 2):
            assert torch.ones(2, device=DEVICE).clone().all() and counter == {"n": expected}


def test_close_leaves_the_operator_as_it_was(registrable: OperatorSpec, chip: Profile) -> None:
    spec = registrable
    keys = (chip.found.dispatch_key, chip.found.autograd_key)
    before = [kernel_at(spec, key) for key in keys]
    counter: dict[str, int] = {}
    registration = spec.register_a1(counter=counter, platform=chip.platform)
    assert all("registration.py" in kernel_at(spec, key) for key in registration.keys)
    registration.close()
    registration.close()
    assert [kernel_at(spec, key) for key in keys] == before
    x = torch.randn(4, 3, device=DEVICE).t()
    x.clone(), x.contiguous(), torch.nn.functional.dropout(x), torch.empty_strided((2,), (1,), device=DEVICE)
    torch.empty_like(x).copy_(x)
    assert counter == {"n": 0}
    assert repr(registration) == f"<Registration of {spec.name} on {chip.platform}: closed>"


def test_after_close_results_have_the_bits_they_had_before(registrable: OperatorSpec, chip: Profile) -> None:
    """Not the gradients that a GPU adds up in any order: they have other bits each time."""
    spec = registrable
    any_order = Semantics.ROUNDS if chip.device.startswith("cuda") else Semantics.PURE

    def results() -> list[Seen]:
        seen = []
        for case in cases(spec, seeds=1):
            torch.manual_seed(0)
            differentiate = not spec.semantics & (WITHOUT_GRADIENT | any_order)
            call = Call.of(case.name, case.values(chip.device), spec, differentiate=differentiate)
            seen.append(call.observe(lambda values: Arguments(spec.overload).call(spec.overload, values)))
        return seen

    before = results()
    registration = spec.register_a1(platform=chip.platform)
    results()
    registration.close()
    bit_for_bit = dataclasses.replace(spec, judge=None)
    pairs = zip(results(), before, strict=True)
    assert [problem for pair in pairs for problem in differences(bit_for_bit, *pair)] == []


def test_dropping_the_handle_does_not_undo_it(clone: OperatorSpec, chip: Profile) -> None:
    counter: dict[str, int] = {}
    clone.register_a1(counter=counter, platform=chip.platform)
    gc.collect()
    torch.ones(2, device=DEVICE).clone()
    assert counter["n"] == 1
    active()[0].close()


def test_a_second_registration_is_refused(clone: OperatorSpec, chip: Profile) -> None:
    with clone.register_a1(platform=chip.platform) as first:
        with pytest.raises(
            RegistrationError, match="clone: is registered already at .*close.. that one first"
        ) as error:
            clone.register_a1(platform=chip.platform)
        assert error.value.code == "already-registered"
        torch.ones(2, device=DEVICE).clone()
        assert first.counts.kernel == 1
    with clone.register_a1(platform=chip.platform):
        pass


def test_a_failure_while_installing_leaves_nothing(
    chip: Profile, monkeypatch: pytest.MonkeyPatch, clone: OperatorSpec
) -> None:
    before = kernel_at(clone, chip.found.dispatch_key)
    monkeypatch.setattr("twinkle.aten.registration.make_router", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        clone.register_a1(platform=chip.platform)
    assert kernel_at(clone, chip.found.dispatch_key) == before and active() == []


def test_nothing_is_kept_after_close(clone: OperatorSpec, chip: Profile) -> None:
    registration = clone.register_a1(platform=chip.platform)
    torch.ones(2, device=DEVICE).clone()
    registration.close()
    gone = weakref.ref(registration)
    del registration
    gc.collect()
    assert gone() is None


def test_two_hundred_cycles(chip: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all operators at once: nothing is kept of any, and each call is counted."""
    monkeypatch.setattr(registration_module, "_GRACE_SECONDS", 0.0)
    x = torch.randn(3, 2, device=DEVICE)
    names = ["clone"] if INTERPRETED else TOGETHER
    uses = [USES[name] for name in names]
    objects, memory = [], []
    for cycle in range(200):
        with install(names, platform=chip.platform) as installed:
            for use in uses:
                use(x)
            assert all(one.counts.kernel > 0 for one in installed.registrations.values())
        reached = [one.counter["n"] for one in installed.registrations.values()]
        for use in uses:
            use(x)
        assert [one.counter["n"] for one in installed.registrations.values()] == reached
        if cycle in (50, 199):
            gc.collect()
            objects.append(len(gc.get_objects()))
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert objects[1] - objects[0] < 100, "something is kept of every registration"
    assert memory[1] - memory[0] < 20_000, "of memory in KB: less than 30 KB a registration"


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter has one state for all threads")
def test_threads_lose_no_count(clone: OperatorSpec, chip: Profile) -> None:
    counter: dict[str, int] = {}
    x = torch.randn(3, 4, device=DEVICE)
    calls, threads = 500, 8

    def work() -> None:
        for _ in range(calls):
            assert torch.equal(x.clone(), x)

    with clone.register_a1(counter=counter, platform=chip.platform) as registration:
        running = [threading.Thread(target=work) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert counter["n"] == registration.counts.kernel == calls * threads


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter has one state for all threads")
def test_threads_that_register_close_and_call(chip: Profile) -> None:
    """Four threads call all operators while four others register and take back, each beginning with another one."""
    x = torch.randn(3, 4, device=DEVICE)
    wrong: list[str] = []
    done = threading.Event()
    served = dict.fromkeys(TOGETHER, 0)
    expected = {name: x / 0.7 if name == "dropout" else USES[name](x) for name in TOGETHER}

    def right(name: str) -> bool:
        result = USES[name](x)
        kept = result != 0 if name == "dropout" else torch.ones_like(result, dtype=torch.bool)
        return torch.allclose(result[kept], expected[name][kept])

    def call() -> None:
        while not done.is_set():
            for name in served:
                try:
                    if not right(name):
                        wrong.append(f"{name}: wrong result")
                except Exception as error:
                    wrong.append(f"{name}: {error}")

    def cycle(first: int) -> None:
        for number in range(100):
            name = TOGETHER[(first + number) % len(TOGETHER)]
            try:
                with catalog.operator(name).register_a1(platform=chip.platform) as registration:
                    USES[name](x)
                    served[name] += registration.counts.kernel
                    if registration.counts.kernel == 0:
                        wrong.append(f"{name}: not reached")
            except RegistrationError as error:
                if error.code != "already-registered":
                    wrong.append(str(error))

    callers = [threading.Thread(target=call) for _ in range(4)]
    cyclers = [threading.Thread(target=cycle, args=(first,)) for first in range(4)]
    for thread in [*callers, *cyclers]:
        thread.start()
    for thread in cyclers:
        thread.join()
    done.set()
    for thread in callers:
        thread.join()
    assert wrong == [] and all(served.values())


# --- several at once --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.multiprocess
def test_a_fork_while_another_thread_registers(environment: dict[str, str], chip: Profile) -> None:
    """The child has no thread that would release the lock."""
    code = f"""
import os, signal, threading
from ops.clone import register_a1
from twinkle.aten.registration import _lock

held, seconds = threading.Event(), 0.3
def hold():
    with _lock:
        held.set()
        threading.Event().wait(seconds)
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    register_a1(platform={chip.platform!r}).close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_install_all(chip: Profile) -> None:
    """All that can be registered and do no harm: in the meantime a module can be built and moved."""
    x = torch.randn(6, 5, device=DEVICE)
    with install(platform=chip.platform) as installed:
        assert set(installed.registrations) == set(catalog.names()) - {"detach", "detach_", "empty", "result_type"}
        torch.nn.functional.dropout(torch.empty_like(x).copy_(x.t().contiguous().t().clone()), 0.5).type_as(x.half())
        torch.empty_strided((2, 3), (1, 2), device=DEVICE).copy_(torch.ones(3, device=DEVICE))
        x[1, 2].item()
        torch.nn.Linear(2, 3).to(DEVICE)
        for name in ("clone", "contiguous", "copy_", "dropout", "empty_like", "empty_strided", "item", "type_as"):
            assert installed.registrations[name].counts.kernel > 0, name
    assert active() == []


@pytest.mark.parametrize("name", ["detach_", "empty", "result_type"])
def test_never_registered_by_design(name: str, chip: Profile) -> None:
    """Whatever the machine; but a wrong key or name is that first."""
    spec = catalog.operator(name)
    for form in ({}, {"platform": chip.platform}, {"platform": "kunlunxin"}, {"dispatch_key": "CUDA"}):
        with pytest.raises(NotRegistrableError, match=f"^{name} is not registered, by design: ") as error:
            spec.register_a1(**form)
        assert isinstance(error.value, NotImplementedError) and error.value.code == "by-design"
    with pytest.raises(RegistrationError, match="unknown platform 'cpv'.*did you mean 'cpu'"):
        spec.register_a1(platform="cpv")
    with pytest.raises(NotRegistrableError):
        install(["clone", name], platform=chip.platform)
    assert active() == []


def test_detach_says_what_it_does_to_modules(chip: Profile, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(3, 2).to(DEVICE)
    with caplog.at_level(logging.WARNING, "twinkle.aten"):
        registration = catalog.operator("detach").register_a1(platform=chip.platform)
    assert "detach is registered: until it is closed, no torch.nn.Parameter can be made" in caplog.text
    with registration:
        x = torch.ones(3, device=DEVICE)
        assert model(x).detach().requires_grad is False
        for make in (
            lambda: torch.nn.Parameter(x),
            lambda: torch.nn.Linear(2, 2, device=DEVICE),
            lambda: deepcopy(model),
        ):
            with pytest.raises(RuntimeError, match="detach is registered with twinkle.aten.*close.. the registration"):
                make()
        assert registration.counts.kernel > 0 and registration.counts.errors == 3
        assert x.detach().data_ptr() == x.data_ptr()
    torch.nn.Parameter(x), torch.nn.Linear(2, 2, device=DEVICE), deepcopy(model)


def test_install_is_all_or_nothing(clone: OperatorSpec, chip: Profile) -> None:
    with clone.register_a1(platform=chip.platform) as mine:
        with pytest.raises(RegistrationError, match="already"):
            install(["contiguous", "clone"], platform=chip.platform)
        assert active() == [mine]
    with pytest.raises(RegistrationError, match="did you mean 'contiguous'"):
        install(["clone", "contigous"], platform=chip.platform)

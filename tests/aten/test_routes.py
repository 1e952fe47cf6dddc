"""Calls that go to PyTorch's own kernel because it was measured to be faster: the table, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.aten.conftest import DEVICE, INTERPRETED, TRITON
from twinkle.aten import Profile, catalog, install, routes
from twinkle.aten.movements import MOVEMENTS, movement
from twinkle.aten.registration import Registration
from twinkle.aten.routes import Routes, Work, routes_of
from twinkle.aten.serving import Serving
from twinkle.aten.spec import OperatorSpec
from twinkle.platforms import PLATFORMS

NVIDIA = PLATFORMS["nvidia"]
ROUTED = ("clone", "contiguous", "copy_", "dropout", "embedding", "type_as")
"""The operators of which the table tells something."""


@pytest.fixture(autouse=True)
def by_routes(as_found: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike in all other tests."""
    monkeypatch.setattr(routes, "_every_size", False)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, int | None]], None]:
    """Gives every operator that is registered a table, whatever its kernel is written in."""

    def put(table: dict[str, int | None]) -> None:
        found = lambda operator, work, platform, level: Routes(work, table)  # noqa: E731
        monkeypatch.setattr("twinkle.aten.modes.routes_of", found)

    return put


def served(registration: Registration) -> dict[str, int]:
    counts = registration.counts
    return {name: n for name, n in {"kernel": counts.kernel, **counts.fallbacks}.items() if n}


# --- the shipped table ------------------------------------------------------------------------------------------------


def entries() -> Iterator[tuple[str, str, str, dict[str, int | None]]]:
    for platform, architectures in routes.table().items():
        for architecture, operators in architectures.items():
            for operator, table in operators.items():
                yield platform, architecture, operator, dict(table)


def test_the_table_names_what_there_is() -> None:
    assert {operator for _, _, operator, _ in entries()} == set(ROUTED)
    for platform, _, operator, table in entries():
        spec = catalog.operator(operator)
        assert platform in PLATFORMS and "triton" in spec.kernels
        assert all(least is None or least > 0 for least in table.values())


def test_every_kind_of_call_can_be_made_anew(registrable: OperatorSpec) -> None:
    """What the table says was, or will be, measured on samples: each is of its kind, and of about the wanted size."""
    work = registrable.work
    for kind, sample in work.samples.items():
        for elements in (2**12, 2**16):
            dtype = torch.int64 if "wide" in kind else torch.bfloat16
            values = sample(elements, torch.device(DEVICE), dtype)
            assert work.kind(*values) == kind
            assert 1 / 2 <= work.size(*values) / (elements * dtype.itemsize) <= 2
            assert Serving(registrable, PLATFORMS["cpu"], "triton").refusal(list(values)) is None
    for _, _, operator, table in entries():
        assert operator != registrable.name or set(table) <= set(work.samples)


@pytest.mark.parametrize("kind", MOVEMENTS)
def test_a_copys_kind_is_that_of_its_sample(kind: str) -> None:
    itemsize = 8 if kind.startswith("wide") else 2
    assert all(movement(*MOVEMENTS[kind](elements), itemsize) == kind for elements in (64, 1000, 2**20))


def test_kinds_of_lookups() -> None:
    """By how long a row is, in bytes; apart from those of which no program can move several elements at a time."""
    kind = catalog.operator("embedding").work.kind
    table = torch.ones(2, 8192, dtype=torch.bfloat16)
    lengths = {16: "short rows", 1008: "short rows", 1024: "rows of 2 KB", 2032: "rows of 2 KB", 2048: "rows of 4 KB"}
    for width, expected in {**lengths, 4096: "rows of 8 KB", 8192: "rows of 8 KB"}.items():
        assert kind(table[:, :width]) == expected
    assert kind(table.float()[:, :1024]) == "rows of 4 KB"
    for uneven in (table[:, ::2], table[:, :1000], torch.ones(2, 1030)[:, :1024], torch.ones(1024, 1024).t()):
        assert kind(uneven) == "uneven rows"


def test_kinds_of_copies() -> None:
    dense = torch.ones(4, 6, 8)
    assert movement(dense.shape, dense.stride(), dense.stride(), 4) == "contiguous"
    swapped = dense.transpose(1, 2)
    assert movement(swapped.shape, swapped.stride(), swapped.stride(), 4) == "contiguous", "in the order of both"
    rows = torch.ones(4, 16)[:, :8]
    assert movement(rows.shape, (8, 1), rows.stride(), 4) == "permuted"
    assert movement((4, 8), (8, 1), (0, 1), 4) == "broadcast"
    assert movement((1, 8), (8, 1), (0, 1), 4) == "contiguous", "a dimension of one element is none"
    assert movement((40, 50), (50, 1), (1, 40), 8) == "wide transposed"
    assert movement((40, 50), (50, 1), (1, 40), 16) == "wide few together", "a pair each"
    assert movement((40, 50), (50, 1), (1, 0), 16) == "wide few together", "a pair each, over and over"


# --- who has routes ---------------------------------------------------------------------------------------------------


def test_an_architecture_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "architecture", lambda platform: "sm_90")
    work = catalog.operator("clone").work
    found = routes_of("clone", work, NVIDIA, "triton")
    assert found is not None and found.code_at_once == "small"
    call = lambda kind, elements: list(work.samples[kind](elements, torch.device("meta"), torch.bfloat16))  # noqa: E731
    assert found.refusal(call("contiguous", 2**28)) == "slower-contiguous"
    assert found.refusal(call("transposed", 2**16)) == "small"
    assert found.refusal(call("transposed", 2**28)) is None


def test_another_architecture_of_that_platform_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "architecture", lambda platform: "sm_1")
    work = catalog.operator("clone").work
    found = routes_of("clone", work, NVIDIA, "triton")
    assert found is not None and found.code_at_once == "unmeasured"
    values = work.samples["transposed"](2**26, torch.device("meta"), torch.bfloat16)
    assert found.refusal(list(values)) == "unmeasured"
    assert found.at_once(1)(values)


def test_who_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that nobody measured, platforms likewise, and programs that aren't compiled."""
    monkeypatch.setattr(routes, "architecture", lambda platform: "sm_90")
    assert routes_of("somebodys_own", Work(), NVIDIA, "triton") is None
    assert routes_of("clone", Work(), PLATFORMS["ascend"], "triton") is None
    assert routes_of("clone", Work(), NVIDIA, "torch") is None
    with routes.every_size():
        assert routes_of("clone", Work(), NVIDIA, "triton") is None
    assert routes_of("clone", Work(), NVIDIA, "triton") is not None
    monkeypatch.setattr(routes, "architecture", lambda platform: None)
    assert routes_of("clone", Work(), NVIDIA, "triton") is None


def test_an_interpreted_program_has_no_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "interpreted", lambda: True)
    assert routes.architecture(NVIDIA) is None
    monkeypatch.setattr(routes, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert routes.architecture(NVIDIA) == "sm_90"


def test_on_this_device_nothing_is_routed(chip: Profile) -> None:
    if DEVICE == "cuda" and not INTERPRETED:
        pytest.skip("here the table decides")
    with install(ROUTED, platform=chip.platform) as installed:
        torch.ones(3, device=DEVICE).clone()
        assert served(installed.registrations["clone"]) == {"kernel": 1}


# --- calls ------------------------------------------------------------------------------------------------------------


TABLE = {"contiguous": None, "transposed": 4 * 32 * 32}
CALLS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "never": (lambda: rows(64).clone(), "slower-contiguous"),
    "large enough": (lambda: in_order(rows(32).t()), "kernel"),
    "not quite": (lambda: in_order(rows(31).t()), "small"),
    "small, of any kind": (lambda: rows(1).clone(), "small"),
    "of another kind": (lambda: rows(64)[:, ::2].clone(), "unmeasured"),
    "not the kernel's": (lambda: torch.zeros(64, 0, device=DEVICE).expand(2, 64, 0).clone(), "small"),
}


def rows(number: int) -> torch.Tensor:
    return torch.arange(32.0 * number, device=DEVICE).view(number, 32)


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("name", CALLS)
def test_calls_go_where_the_table_says(name: str, measured: Any, chip: Profile) -> None:
    call, route = CALLS[name]
    expected = call()
    measured(TABLE)
    with catalog.operator("clone").register_a1(platform=chip.platform) as registration:
        for number in (1, 2, 3):
            result = call()
            assert torch.equal(result, expected) and result.stride() == expected.stride()
            assert served(registration) == {route: number}


@pytest.mark.parametrize(("mode", "route"), [("auto", "slower"), ("native", "native-mode")])
def test_modes(mode: str, route: str, measured: Any, chip: Profile) -> None:
    measured({"contiguous": None})
    with install(["clone"], platform=chip.platform, modes={"clone": mode}) as installed:
        rows(3).clone()
        assert served(installed.registrations["clone"]) == {route: 1}


@pytest.mark.skipif(not TRITON, reason="Triton doesn't run on this device")
def test_the_mode_triton_knows_no_routes(measured: Any, chip: Profile) -> None:
    measured({"contiguous": None})
    with install(["clone"], platform=chip.platform, modes={"clone": "triton"}) as installed:
        rows(3).clone()
        assert served(installed.registrations["clone"]) == {"kernel": 1}


def test_a_number_for_a_tensor_is_no_small_call(measured: Any, chip: Profile) -> None:
    measured({"contiguous": 2**20})
    with catalog.operator("copy_").register_a1(platform=chip.platform) as registration:
        x = torch.zeros(3, device=DEVICE)
        assert x.copy_(2.5).tolist() == [2.5] * 3 and x.copy_(x + 1).tolist() == [3.5] * 3
        assert registration.counts.fallbacks.get("number", 0) >= 1 and registration.counts.fallbacks["small"] >= 1
        assert registration.counts.kernel == registration.counts.errors == 0


@pytest.mark.filterwarnings("ignore")
def test_a_small_call_that_is_traced_adds_nothing_to_the_graph(measured: Any, chip: Profile) -> None:
    def traced() -> list[str]:
        copied = lambda x: torch.zeros_like(x).copy_(x.expand(2, 32))  # noqa: E731
        return [node.kind() for node in torch.jit.trace(copied, rows(2)).graph.nodes()]

    native = traced()
    measured({"contiguous": 2**20})
    with catalog.operator("copy_").register_a1(platform=chip.platform) as registration:
        assert traced() == native
        assert registration.counts.fallbacks["jit-trace"] > 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize("name", ["clone", "copy_"])
def test_what_is_small_at_once_goes_by_bytes(name: str, dtype: torch.dtype) -> None:
    spec = catalog.operator(name)
    is_small = Routes(spec.work, {"transposed": 1024}).at_once(2 if name == "copy_" else 1)
    for number, small in ((1024 // dtype.itemsize - 1, True), (1024 // dtype.itemsize, False)):
        tensor = torch.zeros(number, dtype=dtype)
        assert is_small((tensor, tensor)) is small


@pytest.mark.parametrize(("to", "source"), [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_conversions_count_what_they_make(to: torch.dtype, source: torch.dtype, measured: Any, chip: Profile) -> None:
    """By which they were measured; what they read is larger, or smaller."""
    measured({"cast": 64 * to.itemsize})
    with catalog.operator("type_as").register_a1(platform=chip.platform) as registration:
        for number in (63, 64, 100):
            result = torch.ones(number, dtype=source, device=DEVICE).type_as(torch.ones(1, dtype=to, device=DEVICE))
            assert result.dtype is to and result.tolist() == [1.0] * number
        assert served(registration) == {"small": 1, "kernel": 2}


def test_a_call_of_no_kind_is_pytorchs_and_counted(measured: Any, chip: Profile) -> None:
    """The result of one that asks for an impossible memory format would lie nowhere."""
    measured({"contiguous": 1})
    with catalog.operator("clone").register_a1(platform=chip.platform) as registration:
        with pytest.raises(RuntimeError, match="required rank 4 tensor"):
            rows(3).clone(memory_format=torch.channels_last)
        assert served(registration) == {"route-raised": 1} and registration.counts.errors == 0


def test_gradients_of_small_calls_are_pytorchs(measured: Any, chip: Profile) -> None:
    measured({"transposed": 2**20, "any": 2**20})
    for name, use in (("contiguous", lambda x: x.t().contiguous()), ("dropout", lambda x: torch.dropout(x, 0.0, True))):
        x = rows(2).requires_grad_()
        with catalog.operator(name).register_a1(platform=chip.platform) as registration:
            y = use(x)
            y.sum().backward()
        assert x.grad is not None and x.grad.tolist() == [[1.0] * 32] * 2
        assert served(registration) == {"small": 1}, name


def test_embeddings_count_what_is_looked_up(measured: Any, chip: Profile) -> None:
    """Not the table, which may be as large as it wants."""
    measured({"short rows": 4 * 64 * 16})
    table = torch.rand(1000, 16, device=DEVICE)
    with catalog.operator("embedding").register_a1(platform=chip.platform) as registration:
        for number in (1, 63, 64, 100):
            indices = torch.arange(number, device=DEVICE)
            assert torch.equal(torch.nn.functional.embedding(indices, table), table[:number])
        assert served(registration) == {"small": 2, "kernel": 2}

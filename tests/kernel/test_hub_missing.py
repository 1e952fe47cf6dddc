"""When a kernel of the Hub can't be had: the original stays, and the report says why; no network."""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("kernels")

import kernels
import kernels.utils
from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from tests.support.hub_repository import MLP, NORM, ROTARY, toy, write_kernel
from tests.support.snapshots import bits
from twinkle import presets
from twinkle.kernel import KernelChoice, hub, kernelize
from twinkle.kernel.hub import HubRef
from twinkle.kernel.report import plan, report

pytestmark = pytest.mark.usefixtures("loopback")


def kept(model: nn.Module, value: HubRef, caplog: pytest.LogCaptureFixture, *words: str) -> None:
    """The original stays, the row and a WARNING say why, and the other entry is installed."""
    mapping = {NORM: value, MLP: KernelChoice("swiglu", ("loopback",))}
    caplog.clear()
    kernelize(model, mapping)
    row, other = report(model).rows
    assert (row.state, row.backend, row.instances, other.state) == ("kept", None, 5, "installed")
    warnings = [r.getMessage() for r in caplog.records if r.name == "twinkle.kernel" and r.levelno == logging.WARNING]
    for word in words:
        assert word in row.why(), row.why()
        assert any(word in line for line in warnings)
    assert "\n" not in row.why() and type(model.model.norm) is modeling_qwen3.Qwen3RMSNorm
    bits(model, **presets.inputs(model))
    with pytest.raises(ValueError, match="strict"):
        kernelize(model, mapping, strict=True)


def test_no_package(qwen3: nn.Module, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kernels")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "kernels" else find(name, *a))
    kept(qwen3, toy("RMSNorm"), caplog, "the package kernels is not installed (pip install 'twinkle-kernel[hub]')")
    (row, _) = plan(qwen3, {NORM: toy("RMSNorm"), ROTARY: toy("x")}).rows
    assert row.state == "kept", "a plan says so too"


def test_a_broken_package(qwen3: nn.Module, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", types.ModuleType("kernels"))
    kept(qwen3, toy("RMSNorm"), caplog, "importing get_kernel from kernels raised AttributeError")


def test_too_old(qwen3: nn.Module, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "get_kernel", lambda repo_id, revision=None: None)
    version = importlib.metadata.version("kernels")
    wanted = f"kernels {version} has no get_kernel(backend, trust_remote_code, version=…)"
    kept(qwen3, toy("RMSNorm"), caplog, wanted, "twinkle-kernel[hub]")


def test_free_threaded(qwen3: nn.Module, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    kept(qwen3, toy("RMSNorm"), caplog, "hub kernels are built for Python with the global interpreter lock")


def no_network(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("went online")


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The Hub in offline mode, with a cache in a folder of our own; gives a way to put a kernel there."""
    import socket

    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(kernels.utils, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(socket, "create_connection", no_network)
    monkeypatch.setattr(socket.socket, "connect", no_network)

    def put(name: str) -> None:
        folder = tmp_path / "cache" / "kernels--me--toy"
        write_kernel(folder / "snapshots" / ("a" * 40) / "build" / "torch-cpu", name)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("a" * 40)
        (folder / "refs" / "v1").write_text("a" * 40)

    return put


@pytest.mark.filterwarnings("ignore:Skipping publisher trust check")
def test_offline_without_the_kernel(
    qwen3: nn.Module, caplog: pytest.LogCaptureFixture, offline: Callable[[str], None]
) -> None:
    kept(qwen3, toy("RMSNorm"), caplog, "me/toy:RMSNorm (version 1): ValueError: Version 1", "offline mode")
    revision = hub("me/toy", "RMSNorm", revision="main")
    kept(qwen3, revision, caplog, "me/toy:RMSNorm (revision main): FileNotFoundError", "offline mode")


@pytest.mark.filterwarnings("ignore:Skipping publisher trust check")
def test_offline_with_the_kernel_in_the_cache(qwen3: nn.Module, offline: Callable[[str], None]) -> None:
    offline("toy_kernels_cached")
    kernelize(qwen3, {NORM: toy("RMSNorm")})
    assert report(qwen3).rows[0].state == "installed", report(qwen3).rows[0].why()
    kernelize(qwen3, {NORM: hub("me/toy", "RMSNorm", revision="main")})
    assert report(qwen3).rows[0].state == "installed"


@pytest.mark.parametrize(("name", "words"), [("RMSNrm", "did you mean 'RMSNorm'?"), ("Zebra", "of that name")])
def test_no_such_layer(
    qwen3: nn.Module, caplog: pytest.LogCaptureFixture, repository: str, name: str, words: str
) -> None:
    kept(qwen3, toy(name), caplog, f"me/toy:{name} (version 1) has no layer or function", words)


def test_neither_a_layer_nor_a_function(qwen3: nn.Module, caplog: pytest.LogCaptureFixture, repository: str) -> None:
    kept(qwen3, toy("VERSION"), caplog, "me/toy:VERSION (version 1) is a int, neither a layer nor a function")


def test_a_repository_without_a_build_for_this_machine(
    qwen3: nn.Module, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kernel(tmp_path / "toy" / "build" / "torch29-cxx11-cu128-x86_64-linux", "toy_kernels_cuda")
    monkeypatch.setenv("LOCAL_KERNELS", f"me/toy={tmp_path / 'toy'}")
    kept(qwen3, toy("RMSNorm"), caplog, "me/toy:RMSNorm (version 1): ")


class Overview:
    def __init__(self, trusted: bool) -> None:
        self.trustedKernelPublisher = trusted

    def get_organization_overview(self, publisher: str) -> Overview:
        assert publisher == "me"
        return self


def test_a_publisher_that_is_not_trusted(
    qwen3: nn.Module, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.utils, "_get_hf_api", lambda *a, **k: Overview(trusted=False))
    monkeypatch.setattr(kernels.utils, "install_kernel", no_network)
    kept(qwen3, toy("RMSNorm"), caplog, "'me/toy' is not from a trusted publisher", "trust_remote_code=True")


def test_trust_is_passed_on_and_shown(qwen3: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_kernel(tmp_path / "torch-cpu", "toy_kernels_trusted")
    monkeypatch.setattr(kernels.utils, "_get_hf_api", no_network)
    monkeypatch.setattr(kernels.utils, "install_kernel", lambda *a, **k: folder)
    kernelize(qwen3, {NORM: hub("me/toy", "RMSNorm", revision="main", trust_remote_code=True)})
    (row,) = report(qwen3).rows
    assert row.state == "installed" and "trusted by trust_remote_code=True" in row.why()


def test_the_build_is_for_the_models_device(qwen3: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with an accelerator, the package would take the accelerator's build for a model on the CPU."""
    asked = []

    def get_kernel(repo_id, revision=None, version=None, backend=None, trust_remote_code=False):  # type: ignore[no-untyped-def]
        asked.append(backend)
        raise FileNotFoundError("no build")

    monkeypatch.setattr(kernels, "get_kernel", get_kernel)
    kernelize(qwen3, {NORM: toy("RMSNorm")})
    kernelize(qwen3, {NORM: toy("RMSNorm")}, device="cuda")
    assert asked == ["cpu", None]

"""The words for why something is not used, and the table of accelerators."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
from pathlib import Path

import pytest

from twinkle import platforms
from twinkle.platforms import PLATFORMS, get_platform, platform_of
from twinkle.reasons import Counts, Reason, did_you_mean, nearest

KNOWN = ("Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention", "apply_rotary_pos_emb", "rms_norm")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Qwen3RMSnorm", "Qwen3RMSNorm"),
        ("QWEN3RMSNORM", "Qwen3RMSNorm"),
        ("Qwen3MPL", "Qwen3MLP"),
        ("apply_rotary_pos_embed", "apply_rotary_pos_emb"),
        ("rmsnorm", "rms_norm"),
        ("Qwen3RMSNorm", "Qwen3RMSNorm"),
        ("Zebra", None),
        ("", None),
    ],
)
def test_the_nearest_name(name: str, meant: str | None) -> None:
    assert nearest(name, KNOWN) == meant
    assert did_you_mean(name, KNOWN) == (f"; did you mean {meant!r}?" if meant else "")
    assert nearest(name, ()) is None and did_you_mean(name, ()) == ""


def test_reasons_read_well() -> None:
    assert str(Reason("code", "what is wrong")) == "what is wrong"
    assert str(Reason("code", "what is wrong", "mend it")) == "what is wrong (mend it)"
    reason = Reason("code", "text")
    assert Reason.of(reason, "other") is reason and Reason.of("text", "other") == Reason("other", "text")
    assert hash(reason) == hash(Reason("code", "text")) and reason == Reason("code", "text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a\nb"), "doing it raised ValueError: a"),
        (ValueError(), "doing it raised ValueError"),
        (KeyError("k"), "doing it raised KeyError: 'k'"),
        (ImportError("  \n spaced "), "doing it raised ImportError: spaced"),
    ],
)
def test_an_error_as_a_reason(error: Exception, text: str) -> None:
    assert Reason.of_error(error, "code", "doing it") == Reason("code", text)


def test_counts() -> None:
    counts = Counts()
    counts.fall_back("a")
    counts.fall_back("a")
    counts.fall_back("b")
    assert (counts.kernel, counts.fallbacks, counts.errors, counts.compiled) == (0, {"a": 2, "b": 1}, 0, False)


# --- platforms ------------------------------------------------------------------------------------------------------


def test_the_table() -> None:
    assert {name: (p.device_type, p.dispatch_key, p.autograd_key) for name, p in PLATFORMS.items()} == {
        "cpu": ("cpu", "CPU", "AutogradCPU"),
        "nvidia": ("cuda", "CUDA", "AutogradCUDA"),
        "amd": ("cuda", "CUDA", "AutogradCUDA"),
        "ascend": ("npu", "PrivateUse1", "AutogradPrivateUse1"),
        "cambricon": ("mlu", "PrivateUse1", "AutogradPrivateUse1"),
        "kunlunxin": ("cuda", "CUDA", "AutogradCUDA"),
        "intel": ("xpu", "XPU", "AutogradXPU"),
        "apple": ("mps", "MPS", "AutogradMPS"),
    }
    names = [name for p in PLATFORMS.values() for name in (p.name, *p.aliases)]
    assert len(names) == len(set(names)), "a name or alias stands for two platforms"
    assert "autograd_skips_backend" in PLATFORMS["ascend"].quirks


@pytest.mark.parametrize(
    ("alias", "name"),
    [("cuda", "nvidia"), ("npu", "ascend"), ("mlu", "cambricon"), ("mlu590", "cambricon"), ("rocm", "amd"),
     ("hip", "amd"), ("xpu", "intel"), ("mps", "apple"), ("p800", "kunlunxin"), ("cpu", "cpu"), ("ascend", "ascend")],
)  # fmt: skip
def test_aliases(alias: str, name: str) -> None:
    assert get_platform(alias) is PLATFORMS[name]


@pytest.mark.parametrize(("name", "meant"), [("nvidai", "nvidia"), ("CUDA", "cuda"), ("asend", "ascend")])
def test_an_unknown_platform_names_the_known_ones(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"unknown platform {name!r}; known: cpu, nvidia, cuda, .*mean {meant!r}"):
        get_platform(name)


def test_the_cpu_is_always_there() -> None:
    assert PLATFORMS["cpu"].missing() is None and platform_of("cpu") is PLATFORMS["cpu"]
    assert platform_of("meta") is None


def fake_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, name: str = "torch_npu") -> None:
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ImportError('libascend.so: no such file')", "importing torch_npu raised ImportError: libascend.so"),
        ("raise RuntimeError('torch 2.1 wanted')", "importing torch_npu raised RuntimeError: torch 2.1 wanted"),
        ("import no_such_dependency", "importing torch_npu raised ModuleNotFoundError"),
        ("this is no python", "importing torch_npu raised SyntaxError"),
    ],
)
def test_a_broken_plugin_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str) -> None:
    fake_plugin(tmp_path, monkeypatch, source)
    reason = PLATFORMS["ascend"].missing()
    assert reason is not None and reason.code == "broken-package" and words in reason.text
    assert platform_of("npu") is None


def test_a_plugin_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.delitem(sys.modules, "torch_mlu", raising=False)
    reason = PLATFORMS["cambricon"].missing()
    assert reason == Reason("no-package", "the package torch_mlu is not installed")


def test_a_plugin_without_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    fake_plugin(tmp_path, monkeypatch, "", "torch_mlu")
    assert PLATFORMS["cambricon"].missing() == Reason("no-device", "torch has no device module torch.mlu")
    module = types.SimpleNamespace(is_available=lambda: False)
    monkeypatch.setattr(torch, "mlu", module, raising=False)
    assert PLATFORMS["cambricon"].missing() == Reason("no-device", "torch.mlu.is_available() is False")
    module.is_available = lambda: True
    assert PLATFORMS["cambricon"].missing() is None and platform_of("mlu") is PLATFORMS["cambricon"]
    sys.modules.pop("torch_mlu", None)


def test_a_probe_that_raises_is_a_reason() -> None:
    def probe() -> None:
        raise OSError("driver")

    broken = dataclasses.replace(PLATFORMS["nvidia"], probe=probe)
    assert str(broken.missing()) == "probing nvidia raised OSError: driver"


@pytest.mark.parametrize(("hip", "there", "away"), [(None, "nvidia", "amd"), ("6.0", "amd", "nvidia")])
def test_one_device_type_two_vendors(monkeypatch: pytest.MonkeyPatch, hip: str | None, there: str, away: str) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert PLATFORMS[there].missing() is None
    reason = PLATFORMS[away].missing()
    assert reason is not None and "is built for" in reason.text
    assert platform_of("cuda") is PLATFORMS[there]


def test_importing_the_table_probes_nothing() -> None:
    assert not hasattr(platforms, "torch")

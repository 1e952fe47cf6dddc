"""The accelerators that the project knows, as one table for both levels.

A row says how a platform is named, how PyTorch calls its device, how to see whether the machine has it, and which
dispatch keys its tensors carry. Nothing here is imported or probed before somebody asks.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass

from twinkle.reasons import Reason, did_you_mean


def _through_module(device_type: str, plugin: str | None) -> Callable[[], Reason | None]:
    """A probe that asks ``torch.<device_type>.is_available()``, after importing the vendor's plug-in, if any."""

    def probe() -> Reason | None:
        import torch

        if plugin is not None and plugin not in sys.modules:
            if importlib.util.find_spec(plugin) is None:
                return Reason("no-package", f"the package {plugin} is not installed")
            try:
                importlib.import_module(plugin)
            except Exception as error:  # a broken plug-in is a reason, never a crash
                return Reason.of_error(error, "broken-package", f"importing {plugin}")
        module = getattr(torch, device_type, None)
        if module is None:
            return Reason("no-device", f"torch has no device module torch.{device_type}")
        return None if module.is_available() else Reason("no-device", f"torch.{device_type}.is_available() is False")

    return probe


def _hip() -> bool:
    import torch

    return torch.version.hip is not None


def _cuda_probe(hip: bool) -> Callable[[], Reason | None]:
    ask = _through_module("cuda", None)

    def probe() -> Reason | None:
        missing = ask()
        if missing is None and _hip() is not hip:
            return Reason("no-device", f"this PyTorch is built for {'AMD (ROCm)' if _hip() else 'NVIDIA (CUDA)'}")
        return missing

    return probe


@dataclass(frozen=True)
class Platform:
    """One accelerator.

    Attributes:
        name: the vendor's name; what reports and ``register_a1(platform=…)`` use.
        aliases: other names people use for it.
        device_type: ``torch.device(...).type`` of its tensors.
        probe: None when the machine has it, else the reason why not.
        dispatch_key, autograd_key: the keys that its tensors carry in PyTorch's dispatcher.
        triton_backend: what Triton calls its target there; None where Triton has none.
        quirks: flags that the ATen level reads, e.g. ``autograd_skips_backend``.
    """

    name: str
    aliases: tuple[str, ...]
    device_type: str
    probe: Callable[[], Reason | None]
    dispatch_key: str
    autograd_key: str
    triton_backend: str | None = None
    quirks: frozenset[str] = frozenset()

    def missing(self) -> Reason | None:
        """None when this machine has the platform, else the reason; a probe that raises is a reason too."""
        try:
            return self.probe()
        except Exception as error:
            return Reason.of_error(error, "probe-failed", f"probing {self.name}")


PLATFORMS: dict[str, Platform] = {
    platform.name: platform
    for platform in (
        Platform("cpu", (), "cpu", lambda: None, "CPU", "AutogradCPU"),
        Platform("nvidia", ("cuda",), "cuda", _cuda_probe(hip=False), "CUDA", "AutogradCUDA", "cuda"),
        Platform("amd", ("hip", "rocm"), "cuda", _cuda_probe(hip=True), "CUDA", "AutogradCUDA", "hip"),
        Platform(
            "ascend",
            ("npu",),
            "npu",
            _through_module("npu", "torch_npu"),
            "PrivateUse1",
            "AutogradPrivateUse1",
            "npu",
            frozenset({"autograd_skips_backend"}),
        ),
        Platform(
            "cambricon",
            ("mlu", "mlu590"),
            "mlu",
            _through_module("mlu", "torch_mlu"),
            "PrivateUse1",
            "AutogradPrivateUse1",
            "mlu",
        ),
        # Kunlunxin's plug-in presents its chips as CUDA devices.
        Platform("kunlunxin", ("p800",), "cuda", _through_module("cuda", "torch_xmlir"), "CUDA", "AutogradCUDA", "xpu"),
        Platform("intel", ("xpu",), "xpu", _through_module("xpu", None), "XPU", "AutogradXPU", "xpu"),
        Platform("apple", ("mps",), "mps", _through_module("mps", None), "MPS", "AutogradMPS"),
    )
}


def get_platform(name: str) -> Platform:
    """The platform of that name or alias.

    Raises:
        ValueError: unknown name; the message lists the known ones and the nearest.
    """
    for platform in PLATFORMS.values():
        if name == platform.name or name in platform.aliases:
            return platform
    names = [n for platform in PLATFORMS.values() for n in (platform.name, *platform.aliases)]
    raise ValueError(f"unknown platform {name!r}; known: {', '.join(names)}{did_you_mean(name, names)}")


def platforms_called(name: str) -> list[Platform]:
    """Those of that name, alias or device type, here or not."""
    return [p for p in PLATFORMS.values() if name in (p.name, *p.aliases, p.device_type)]


def platform_of(device_type: str) -> Platform | None:
    """The platform of this machine whose tensors have that ``device_type``; None for types like ``meta``."""
    candidates = [platform for platform in PLATFORMS.values() if platform.device_type == device_type]
    return next((platform for platform in candidates if platform.missing() is None), None)

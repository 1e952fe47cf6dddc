"""Kernels from the Hugging Face Hub, through the optional package ``kernels``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from typing import Any

from twinkle.naming import version_of
from twinkle.reasons import Reason, did_you_mean


@dataclass(frozen=True)
class HubRef:
    """A layer or function of a kernel repository; made by :func:`hub`."""

    repo_id: str
    name: str
    revision: str | None = None
    version: int | None = None
    trust_remote_code: bool = False

    def __str__(self) -> str:
        at = f"version {self.version}" if self.revision is None else f"revision {self.revision}"
        trusted = ", trusted by trust_remote_code=True" if self.trust_remote_code else ""
        return f"{self.repo_id}:{self.name} ({at}{trusted})"

    def missing(self) -> Reason | None:
        """Why no hub kernel can be loaded on this machine; None when one can. Nothing is fetched."""
        hint = "pip install 'twinkle-kernel[hub]'"
        if "kernels" not in sys.modules and importlib.util.find_spec("kernels") is None:
            return Reason("no-package", "the package kernels is not installed", hint)
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            return Reason("free-threaded", "hub kernels are built for Python with the global interpreter lock")
        try:
            get_kernel = importlib.import_module("kernels").get_kernel
        except Exception as error:
            return Reason.of_error(error, "broken-package", "importing get_kernel from kernels")
        needed = {"revision", "version", "backend", "trust_remote_code"}
        lacking = needed - set(inspect.signature(get_kernel).parameters)
        if lacking:
            version = version_of("kernels") or "(unknown version)"
            return Reason(
                "wrong-version",
                f"kernels {version} has no get_kernel({', '.join(sorted(lacking))}=…)",
                f"{hint} brings one that has",
            )
        return None

    def load(self, target: Any, site: Any) -> Any:
        """Fetches the repository (or takes it from the cache) and gives the layer class or function.

        Raises:
            RuntimeError: whatever went wrong, in one line that names the kernel; it becomes the report's reason.
        """
        import kernels

        try:
            repository = kernels.get_kernel(
                self.repo_id,
                revision=self.revision,
                version=self.version,
                # Else the package takes the build for the accelerator that torch is made for, wherever the model is.
                backend="cpu" if site.device.type == "cpu" else None,
                trust_remote_code=self.trust_remote_code,
            )
        except Exception as error:
            message = " ".join(str(error).split())[:300]
            raise RuntimeError(f"{self}: {type(error).__name__}: {message}") from error
        holders = [holder for holder in (getattr(repository, "layers", None), repository) if holder is not None]
        found = next((getattr(holder, self.name) for holder in holders if hasattr(holder, self.name)), None)
        if found is None:
            known = [name for holder in holders for name in vars(holder) if not name.startswith("_")]
            raise RuntimeError(f"{self} has no layer or function of that name{did_you_mean(self.name, known)}")
        if not callable(found):
            raise RuntimeError(f"{self} is a {type(found).__name__}, neither a layer nor a function")
        return _limited(found)


def _limited(kernel: Any) -> Any:
    """A layer or function that says it has no backward, or can't be compiled, leaves such calls to the original."""
    backward, compiles = getattr(kernel, "has_backward", True), getattr(kernel, "can_torch_compile", False)
    if backward and compiles:
        return kernel

    def accepts_call(*args: Any, **kwargs: Any) -> str | None:
        import torch

        if not compiles and torch.compiler.is_compiling():
            return "the hub kernel can't be compiled"
        if not backward and torch.is_grad_enabled() and _requires_grad((*args, *kwargs.values())):
            return "the hub kernel has no backward"
        return None

    if isinstance(kernel, type):
        copied = {name: getattr(kernel, name) for name in ("__module__", "__qualname__", "__doc__")}
        return type(kernel.__name__, (kernel,), {**copied, "accepts_call": staticmethod(accepts_call)})

    @functools.wraps(kernel)
    def function(*args: Any, **kwargs: Any) -> Any:
        return kernel(*args, **kwargs)

    function.accepts_call = accepts_call  # type: ignore[attr-defined]
    return function


def _requires_grad(values: tuple[Any, ...]) -> bool:
    """Whether a call needs a gradient: of an argument, or of a weight of the module that is called."""
    import torch

    for value in values:
        tensors = value.parameters() if isinstance(value, torch.nn.Module) else (value,)
        if any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
            return True
    return False


def hub(
    repo_id: str,
    name: str,
    *,
    revision: str | None = None,
    version: int | None = None,
    trust_remote_code: bool = False,
) -> HubRef:
    """A mapping's value: a layer or function of a kernel repository on the Hugging Face Hub.

    Nothing is loaded before ``kernelize``. Whatever then goes wrong (package missing, offline, no such layer, publisher
    not trusted) is the reason in the entry's report row, and the original stays.

    Args:
        repo_id: ``"organisation/repository"``.
        name: the layer class (in the repository's ``layers``) or the function.
        revision: a branch, tag or commit; exactly one of this and ``version``.
        version: the kernel's version; floats within it, so a revision pins more.
        trust_remote_code: run code of a publisher that the Hub doesn't mark as trusted.

    Raises:
        ValueError: not exactly one of revision and version, or a malformed name.
    """
    if not isinstance(repo_id, str) or repo_id.count("/") != 1 or not all(repo_id.split("/")):
        raise ValueError(f"hub(): repo_id must be 'organisation/repository', got {repo_id!r}")
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"hub({repo_id!r}): the layer's or function's name must be an identifier, got {name!r}")
    if (revision is None) == (version is None):
        given = "both" if revision is not None else "neither"
        raise ValueError(
            f"hub({repo_id!r}, {name!r}): give exactly one of revision='…' and version=…, got {given}; "
            "a repository's content may change, so what is loaded must be said"
        )
    if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
        raise ValueError(f"hub({repo_id!r}, {name!r}): version must be an integer, got {version!r}")
    if revision is not None and not (isinstance(revision, str) and revision):
        raise ValueError(f"hub({repo_id!r}, {name!r}): revision must be a branch, tag or commit, got {revision!r}")
    if not isinstance(trust_remote_code, bool):
        raise ValueError(
            f"hub({repo_id!r}, {name!r}): trust_remote_code must be True or False, got {trust_remote_code!r}"
        )
    return HubRef(repo_id, name, revision, version, trust_remote_code)

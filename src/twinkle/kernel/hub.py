"""Kernels from the Hugging Face Hub, through the optional package ``kernels``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from typing import Any

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
        return f"{self.repo_id}:{self.name} ({at})"

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
        lacking = {"revision", "version", "trust_remote_code"} - set(inspect.signature(get_kernel).parameters)
        if lacking:
            return Reason(
                "wrong-version",
                f"kernels {_version()} has no get_kernel({', '.join(sorted(lacking))}=…)",
                f"{hint} brings one that has",
            )
        return None

    def load(self, target: Any, site: Any) -> Any:
        """Fetches the repository (or takes it from the cache) and gives the layer class or function.

        Raises:
            Exception: whatever went wrong, as the package kernels says it; it becomes the report's reason.
        """
        import kernels

        repository = kernels.get_kernel(
            self.repo_id,
            revision=self.revision,
            version=self.version,
            trust_remote_code=self.trust_remote_code,
        )
        layers = getattr(repository, "layers", None)
        found = getattr(layers, self.name, None) or getattr(repository, self.name, None)
        if found is None:
            known = [name for holder in (layers, repository) if holder for name in dir(holder) if name[0] != "_"]
            raise LookupError(f"{self.repo_id} has no layer or function {self.name!r}{did_you_mean(self.name, known)}")
        if not getattr(found, "has_backward", True):
            found = _inference_only(found)
        return found


def _inference_only(layer: Any) -> Any:
    """A layer that says it has no backward leaves calls that need one to the original."""

    def accepts_call(*args: Any, **kwargs: Any) -> str | None:
        import torch

        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return "the hub kernel has no backward"
        return None

    return type(layer.__name__, (layer,), {"accepts_call": staticmethod(accepts_call), "__module__": layer.__module__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kernels")
    except PackageNotFoundError:
        return "(unknown version)"


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
    return HubRef(repo_id, name, revision, version, trust_remote_code)

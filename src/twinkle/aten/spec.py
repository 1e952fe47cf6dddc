"""What an operator's package declares; everything else about it is derived from this."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from twinkle.aten.errors import RegistrationError
from twinkle.aten.home import Home
from twinkle.aten.keys import DEFAULT_KEY, is_dispatched
from twinkle.aten.routes import Work
from twinkle.platforms import PLATFORMS
from twinkle.reasons import did_you_mean

if TYPE_CHECKING:
    from twinkle.aten.registration import Registration


class Semantics(enum.Flag):
    """How an operator's result relates to what it was given."""

    PURE = 0
    MAY_ALIAS = enum.auto()
    """It may return its input itself."""
    IN_PLACE = enum.auto()
    """It writes into its first argument and returns it."""
    ALLOCATES = enum.auto()
    """Its result holds no values yet."""
    RANDOM = enum.auto()
    """It draws from PyTorch's generator."""
    HOST_READ = enum.auto()
    """It waits for the device and returns a Python number."""
    METADATA = enum.auto()
    """It looks at no element, and returns no tensor."""
    DETACHED = enum.auto()
    """It gives its argument's own memory, without its gradient."""
    ROUNDS = enum.auto()
    """It rounds in an order of its own: it is judged by how far it is from exact numbers, beside PyTorch's own kernel.
    Its layout isn't judged, nor whether it is the visible part of a larger tensor of its own: with PyTorch's own, both
    depend on which of several kernels serves a call."""


WITHOUT_GRADIENT = Semantics.ALLOCATES | Semantics.HOST_READ | Semantics.METADATA | Semantics.DETACHED
"""A result of these kinds has no gradient. Every other operator needs a rule for it."""


@dataclass(frozen=True)
class Condition:
    """One thing that must hold of a call for a kernel to take it.

    Args:
        code: what the counts show where it doesn't hold.
        text: what holds, for people; the operator's documents are made of it.
        holds: called with all the operator's arguments, in the schema's order.
        beyond: ``beyond(device)`` gives arguments for which it doesn't hold; tests show that native serves them.
        each_time: it looks at more than the layout: at elements, at where they lie, at pending conjugation or negation,
            at what autograd knows of a tensor. Any other condition is asked once for calls whose tensors have the same
            types, dtypes, shapes, strides and devices, and whose other arguments are equal.
    """

    code: str
    text: str
    holds: Callable[..., bool]
    beyond: Callable[[torch.device], tuple[Any, ...]]
    each_time: bool = False


@dataclass(frozen=True)
class Kernel:
    """One implementation of the operator: a function with the operator's own signature.

    Args:
        path: ``"kernel.triton_level:clone_triton"``, in the operator's folder; imported when it is chosen.
        conditions: what must hold for this kernel, beyond what must hold for all.
        with_pullback: path of a function with the operator's signature that returns a :data:`WithPullback`; for a
            kernel whose gradient needs more than the operator's arguments, as randomness does. Otherwise the operator's
            ``gradient`` serves.
    """

    path: str
    conditions: tuple[Condition, ...] = ()
    with_pullback: str | None = None


Pullback = Callable[..., tuple[torch.Tensor | None, ...]]
"""What makes the gradients of the leading arguments from the result's, and from the tensors that were kept for it."""
WithPullback = tuple[torch.Tensor, Pullback, *tuple[torch.Tensor, ...]]
"""The result, its pullback, and the tensors that it is called with after the result's gradient: autograd keeps them,
frees them after use, and shows them to hooks on what is saved. A closure would hold them behind its back."""
Gradient = Callable[[Callable[..., torch.Tensor], list[Any]], tuple[torch.Tensor, Pullback]]
"""``gradient(kernel, arguments)`` -> the result, and what makes the gradients of the leading arguments from its own.

The latter is made of differentiable operators, so that gradients of gradients exist.
"""


_PATH = re.compile(r"[\w.]+:\w+")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OperatorSpec:
    """One ATen operator of the library.

    Args:
        schema: as PyTorch prints it, without ``aten::``; compared with the running PyTorch's at registration.
        home: ``Home.of(__name__, __file__)``.
        semantics: see :class:`Semantics`.
        kernels: by level. ``"torch"`` is made of other ATen operators, and is the operator's kernel where there is no
            other: ``"triton"`` where Triton runs, and before that the one under a platform's name on that platform.
        conditions: which calls the kernels take; all others are native's. Checked in this order, those that are asked
            each time after the others.
        gradient: the derivative, needed where a kernel is installed at an autograd key; None where the result has none
            (:data:`WITHOUT_GRADIENT`), where every kernel has its own, and with ``pullback``.
        pullback: path of ``pullback(grad, *arguments)``, for a derivative that needs the arguments: the gradients of
            the leading ones. Autograd keeps them meanwhile, and raises where one was written.
        shape_only: positions of tensors of which the ``pullback`` needs no more than the shape. It gets that instead,
            and they may be written meanwhile.
        derivative: path of the spec of another operator, in a folder of this one's: what PyTorch's own derivative of
            this operator calls. Both are registered and taken back together.
        routing: beyond these the kernel could take a call, but PyTorch's own is faster. They are looked at last, and
            only in the mode ``"auto"``.
        work: what a call's time goes by, for routes that were measured: see :mod:`twinkle.aten.routes`.
        differentiable: positions of the arguments that may have a gradient; all tensors when left out.
        reference: the CPU reference, ``"reference:clone_reference"``: the operator's signature, and its maths in the
            plainest form.
        judge: path of ``judge(result, *arguments) -> str | None``, which tells what is wrong with a result where it
            can't be compared with the reference's, bit by bit.
        by_design: why the operator is never registered; its kernel can be called, and is checked, all the same.
        caution: what goes wrong in the process while it is registered. It is logged as a WARNING at registration, and
            such an operator is not one of ``install("all")``.
        called_within: within what PyTorch calls it as well, for people to read, where those calls are far more, and few
            of them worth a kernel: ``install("auto")`` leaves it out.
        model: what the model of the framework level must be for it to call the operator: ``preset``, ``dtype``, and
            settings of its configuration.

    Raises:
        RegistrationError: no operator could be made of that; the message says what to write.
    """

    schema: str
    home: Home
    semantics: Semantics
    kernels: Mapping[str, Kernel]
    conditions: tuple[Condition, ...]
    reference: str
    gradient: Gradient | None = None
    pullback: str | None = None
    shape_only: tuple[int, ...] = ()
    derivative: str | None = None
    routing: tuple[Condition, ...] = ()
    work: Work = field(default_factory=Work)
    differentiable: tuple[int, ...] | None = None
    judge: str | None = None
    by_design: str | None = None
    caution: str | None = None
    called_within: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise RegistrationError.of(self.name, "bad-spec", f"its OperatorSpec can't be used: {problem}")

    def _problems(self) -> Iterator[str]:
        """What an author may get wrong; the first is enough."""
        if not re.fullmatch(r"\w+(\.\w+)?\(.*\) -> .+", self.schema):
            yield f"the schema {self.schema!r} is not as PyTorch prints it, without aten::"
        if "torch" not in self.kernels:
            yield f"no kernel 'torch', which serves where none of the others does: {', '.join(self.kernels) or 'none'}"
        levels = ("torch", "triton", *PLATFORMS)
        for level, kernel in self.kernels.items():
            if level not in levels:
                close = did_you_mean(level, levels)
                yield f"no machine would run the kernel {level!r}; known: {', '.join(levels)}{close}"
            for path in filter(None, (kernel.path, kernel.with_pullback)):
                if not _PATH.fullmatch(path):
                    yield f"{path!r} is not the path of a function: 'kernel.torch_level:{self.name}_torch'"
        for path in filter(None, (self.reference, self.pullback, self.derivative, self.judge)):
            if not _PATH.fullmatch(path):
                yield f"{path!r} is not a path: 'reference:{self.name}_reference'"
        if self.gradient is None and self.pullback is None and not self.semantics & WITHOUT_GRADIENT:
            lacking = [level for level, kernel in self.kernels.items() if kernel.with_pullback is None]
            if lacking:
                yield f"no gradient for its kernels {', '.join(lacking)}: gradient=, pullback= or their with_pullback="

    def __repr__(self) -> str:
        return f"<OperatorSpec {self.name}>"

    @property
    def name(self) -> str:
        """``clone``: the operator's name, its folder's, and what its functions' names begin with."""
        return self.schema.partition("(")[0].partition(".")[0]

    @functools.cached_property
    def overload(self) -> torch._ops.OpOverload:
        """The operator in the running PyTorch.

        Raises:
            RegistrationError: it has no such operator, or one with another schema.
        """
        overload_name = self.schema.partition("(")[0].partition(".")[2]
        packet = getattr(torch.ops.aten, self.name, None)
        name = overload_name or "default"
        overload: torch._ops.OpOverload[Any, Any] | None = None if packet is None else getattr(packet, name, None)
        if overload is not None and not is_dispatched(overload):
            overload = None
        found = "none" if overload is None else str(overload._schema).removeprefix("aten::")
        if found != self.schema:
            text = f"this PyTorch ({torch.__version__}) has another schema than the kernels were written for: {found}"
            raise RegistrationError.of(self.name, "schema", text, f"written for {self.schema}")
        assert overload is not None
        return overload

    @functools.cached_property
    def companion(self) -> OperatorSpec | None:
        """The operator that ``derivative`` names."""
        return None if self.derivative is None else self.home.load(self.derivative)

    @property
    def parts(self) -> tuple[OperatorSpec, ...]:
        """This operator, and the one that ``derivative`` names: what has kernels, inputs and golden data of its own."""
        return (self,) if self.companion is None else (self, self.companion)

    @property
    def native(self) -> Callable[..., Any]:
        """PyTorch's own operator, to be called."""
        # A dtype that an operator gives is a number where it is called by its overload.
        return getattr(torch, self.name) if Semantics.METADATA in self.semantics else self.overload

    def register_a1(
        self, dispatch_key: str = DEFAULT_KEY, counter: dict[str, int] | None = None, platform: str | None = None
    ) -> Registration:
        """Makes PyTorch call the operator's own kernel, in this process, on one platform.

        Args:
            dispatch_key: the platform's canonical (autograd) or compatible (backend) key. It is a role: at which keys
                the kernel is installed depends on the operator; ``Registration.keys`` tells.
            counter: ``counter["n"]`` grows by one at each call that arrives, whoever then serves it.
            platform: a platform's name or alias; with the default key it decides alone.

        Returns:
            The live handle: ``close()`` undoes it, as does leaving it as a context manager; it lives until then.

        Raises:
            RegistrationError: a RuntimeError; unknown, refused or foreign key, unknown platform, no such device on this
                machine, or the operator is registered already. Nothing was changed.
            NotRegistrableError: a NotImplementedError; the operator is never registered, by design.
        """
        from twinkle.aten.registration import register  # here, since it imports specs

        return register(self, dispatch_key, counter, platform)

    def aten(self, /, *args: Any, **kwargs: Any) -> Any:
        """The operator by its own kernel, without registering anything: the same arguments, the same result.

        Calls that the kernel doesn't take go to PyTorch's own operator.
        """
        from twinkle.aten.direct import call  # likewise

        return call(self, args, kwargs)

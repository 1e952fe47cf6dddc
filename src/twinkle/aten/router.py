"""What stands at a dispatch key: it counts, decides call by call, and calls the kernel or what stood there before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from twinkle.aten.below import Below
from twinkle.aten.launch import is_interpreting
from twinkle.aten.serving import Serving, interference, unseen
from twinkle.reasons import Counting


class Traffic:
    """What the routers of one registration share.

    Attributes:
        operator: its name.
        counts: where calls are counted just now; looked up at each call, since a process may come to count elsewhere.
        open: while False, every call goes straight to what stood there before.
    """

    def __init__(self, operator: str, serving: Serving, counts: Counting, counter: dict[str, int]) -> None:
        self.operator = operator
        self.serving = serving
        self.counts = counts
        self.counter = counter
        self.flight = serving.flight
        self.open = True


def make_router(traffic: Traffic, below: Below, at_autograd: bool) -> Callable[..., Any]:
    """The function for one dispatch key.

    Args:
        traffic: what it shares with the other key's.
        below: what stood at that key before.
        at_autograd: whether the key is an autograd key.
    """
    serving, counter, flight = traffic.serving, traffic.counter, traffic.flight
    if at_autograd and serving.is_detached:
        return _passing_router(traffic, below)
    arguments, notes_arrival = serving.arguments, serving.is_detached
    bind, wrap_numbers = arguments.bind, arguments.wrap_numbers
    lasting_refusal, refusal_this_time = serving.lasting_refusal, serving.refusal_this_time
    ungradable = serving.ungradable if at_autograd else None
    routes = serving.routes if arguments.leading else None
    is_small = None if routes is None else routes.at_once(arguments.leading)
    small = None if routes is None else routes.code_at_once
    serve = serving.run_with_gradient if at_autograd else serving.run
    native = below.call

    def router(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if flight.busy or not traffic.open:
            flight.called_itself = flight.called_itself or not is_interpreting()
            return native(keyset, wrap_numbers(args), kwargs)
        if notes_arrival:
            flight.arrived = True
        _count(counter)
        reason = small
        plain = is_small is not None and is_small(args)
        if not plain:
            with unseen():
                reason = interference(at_autograd) or lasting_refusal(args, kwargs)
                if reason is None:
                    values = bind(args, kwargs)
                    reason = refusal_this_time(values)
                    if reason is None and ungradable is not None:
                        reason = ungradable(values)
        flight.busy = True
        try:
            if reason is not None:
                traffic.counts.fall_back(reason)
                return native(keyset, args if plain else wrap_numbers(args), kwargs)
            flight.called_itself = False
            result = serve(values)
        except BaseException as error:
            traffic.counts.errors += reason is None
            error.add_note(f"raised by aten::{traffic.operator}, {_who(serving.level, reason)}")
            raise
        finally:
            flight.busy = False
        if flight.called_itself:
            traffic.counts.fall_back("delegated")
        else:
            traffic.counts.kernel += 1
        return result

    return router


def _who(level: str, reason: str | None) -> str:
    if reason is None:
        return f"by twinkle's {level} kernel"
    return f"by PyTorch's own kernel, since twinkle's doesn't take the call: {reason}"


def _passing_router(traffic: Traffic, below: Below) -> Callable[..., Any]:
    """At an autograd key, for an operator of which autograd does a part that Python can't.

    Native does that part and goes on to the backend key, where our kernel is. On a device where it doesn't, the call is
    counted here, as one that native served.
    """
    counter, flight = traffic.counter, traffic.flight

    def router(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        flight.arrived = False
        result = below.call(keyset, args, kwargs)
        if traffic.open and not flight.busy and not flight.arrived:
            _count(counter)
            traffic.counts.fall_back("autograd-only")
        return result

    return router


def _count(counter: dict[str, int]) -> None:
    """One more call that arrived, whatever the counter's owner has made of it meanwhile: a call never fails of that."""
    # Nothing between reading and writing a count lets another thread in, as long as there is no call there.
    try:
        counter["n"] += 1
    except Exception:  # it was emptied, or holds no number
        with contextlib.suppress(Exception):
            counter["n"] = 1

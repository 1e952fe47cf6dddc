"""A model's own forward with a few of its statements replaced.

A kernel that takes the place of several modules needs another forward around it. Written by hand that would be a copy
of one version of a model's code; instead the code that is there is taken, and only the statements that the kernel
serves become a call. Whatever else the model does, today or in its next version, is still its own code.

Code is recognised by its syntax tree, and only where the source at hand is what runs: compiled again, it must give the
very code of the live function. Decorators stay: their wrappers are put around the new function as they were around the
old one.
"""

from __future__ import annotations
import __future__ as features

import ast
import functools
import linecache
import types
from collections.abc import Callable, Iterator
from typing import Any

from twinkle.kernel.wrappers import decorated_as, undecorated
from twinkle.reasons import Reason

Statements = list[ast.stmt]

_FEATURES = functools.reduce(int.__or__, (getattr(features, name).compiler_flag for name in features.all_feature_names))


def body_of(function: Any) -> ast.FunctionDef | Reason:
    """The syntax tree of a live function, without its decorators, or the reason why it can't be had or used."""
    function = undecorated(function)
    if not isinstance(function, types.FunctionType):
        return Reason("other-code", "its forward is no plain Python function")
    code = function.__code__
    if code.co_freevars:
        return Reason("other-code", "its forward is a closure, or calls super()")
    found = _trees(code.co_filename, code.co_flags & _FEATURES).get(code)
    if found is None:
        return Reason("no-source", "the source of its forward isn't there, or isn't what runs")
    if any(map(_is_mangled, _identifiers(found))):
        return Reason("other-code", "its forward uses private names of its class")
    return found


@functools.lru_cache(maxsize=64)
def _trees(filename: str, flags: int) -> dict[types.CodeType, ast.FunctionDef]:
    """The functions of a file: what each compiles to -> its tree."""
    text = "".join(linecache.getlines(filename))
    if not text:
        return {}
    try:
        tree = ast.parse(text, filename)
        whole = compile(text, filename, "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError):
        return {}
    # A decorated function's code begins at its first decorator.
    lines = {
        min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]): node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    return {code: lines[code.co_firstlineno] for code in _codes(whole) if code.co_firstlineno in lines}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def _identifiers(tree: ast.AST) -> Iterator[str]:
    """Of attributes, variables and parameters."""
    for node in ast.walk(tree):
        for field in ("attr", "id", "arg"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield name


def _is_mangled(name: str) -> bool:
    """Whether it is another name inside a class than outside, where the new function is compiled."""
    return name.startswith("__") and not name.endswith("__")


def rewritten(function: Any, tree: ast.FunctionDef, body: Statements, **given: Any) -> Callable[..., Any]:
    """A function like a live one, its decorators included, with another body.

    Args:
        function: whose globals, defaults and lines it has, and whose wrappers.
        tree: the function's, see :func:`body_of`.
        body: the new statements, in which the names of ``given`` may occur.
        given: what those names mean.
    """
    arguments = ast.arguments(
        posonlyargs=_bare(tree.args.posonlyargs),
        args=_bare(tree.args.args),
        vararg=None if tree.args.vararg is None else ast.arg(tree.args.vararg.arg),
        kwonlyargs=_bare(tree.args.kwonlyargs),
        kw_defaults=[None for _ in tree.args.kwonlyargs],
        kwarg=None if tree.args.kwarg is None else ast.arg(tree.args.kwarg.arg),
        defaults=[],
    )
    inner: Any = ast.FunctionDef(name=tree.name, args=arguments, body=body, decorator_list=[])
    inner.type_params = []
    outer: Any = ast.FunctionDef(
        name="make",
        args=ast.arguments([], [ast.arg(name) for name in given], None, [], [], None, []),
        body=[inner, ast.Return(ast.Name(tree.name, ast.Load()))],
        decorator_list=[],
    )
    outer.type_params = []
    module = ast.Module([ast.copy_location(outer, tree)], [])
    ast.copy_location(inner, tree)
    plain = undecorated(function)
    code = plain.__code__
    compiled = compile(
        ast.fix_missing_locations(module), code.co_filename, "exec", flags=code.co_flags & _FEATURES, dont_inherit=True
    )
    made: dict[str, Any] = {}
    exec(compiled, plain.__globals__, made)
    result = made["make"](**given)
    result.__defaults__, result.__kwdefaults__ = plain.__defaults__, plain.__kwdefaults__
    return decorated_as(function, functools.update_wrapper(result, plain))


def _bare(arguments: list[ast.arg]) -> list[ast.arg]:
    return [ast.arg(argument.arg) for argument in arguments]

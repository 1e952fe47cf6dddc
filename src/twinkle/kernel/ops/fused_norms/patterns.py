"""The statements of a model's forward that a kernel can serve together, and what takes their place.

Residual sum and norm, three statements one after the other, with any names and any second summand::

    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)

Norms and rotary embedding of queries and keys: both are normalised, before their heads' dimension moves or after::

    query_states = self.q_norm(self.q_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
    key_states = self.k_norm(self.k_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
    ...
    query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

What stands between must be plain assignments that don't touch the two, so that it doesn't matter that the norms come
after it then. A norm or a rotation under a condition is another code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from twinkle.kernel.ops.fused_norms.rewriting import Statements
from twinkle.reasons import Reason

FUSED = "twinkle_fused"
"""The name by which the new statements call the kernel."""


@dataclass(frozen=True)
class Found:
    """Statements that can be replaced.

    Attributes:
        norms: the children whose calls are among them.
        body: the forward's statements with a call of :data:`FUSED` in their place.
        rotary: the global function that rotates; None where nothing does.
        heads_at: which dimension of what the norms get is the heads'.
    """

    norms: tuple[str, ...]
    body: Statements
    rotary: str | None = None
    heads_at: int = 0


def sum_and_norm(tree: ast.FunctionDef) -> Found | Reason:
    """A residual sum whose norm follows: ``total, normed = FUSED(self.NORM, residual, summand)``."""
    me, body = _self(tree), tree.body
    for at in range(len(body) - 2):
        added, kept, normed = (_assigned(statement) for statement in body[at : at + 3])
        if added is None or kept is None or normed is None:
            continue
        (total, value), (residual, same), (hidden, call) = added, kept, normed
        norm = _called_child(call, me)
        is_sum = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
        if norm is None or not is_sum or not _is_name(same, total) or not _is_name(norm[1], total):
            continue
        if hidden != total or residual == total:  # else one of the names means something else afterwards
            continue
        assert isinstance(value, ast.BinOp)
        fused = ast.Assign(
            [_names(residual, hidden)], _call(_child(me, norm[0]), value.left, value.right), lineno=body[at].lineno
        )
        return Found((norm[0],), [*body[:at], _placed(fused, body[at + 2]), *body[at + 3 :]])
    return Reason("other-code", "its forward doesn't add to a residual and normalise the sum right after")


def norms_and_rotary(tree: ast.FunctionDef) -> Found | Reason:
    """Norms of queries and keys, and a rotation: ``q, k = FUSED(self.Q_NORM, self.K_NORM, ROTARY, q, k, …)``."""
    me, body = _self(tree), tree.body
    rotation = next(((at, parts) for at, s in enumerate(body) if (parts := _rotation(s)) is not None), None)
    if rotation is None:
        return Reason("other-code", "its forward doesn't rotate queries and keys in one unconditional call")
    end, (q, k, function, tables) = rotation
    q_found, k_found = (_last_norm(body[:end], name, me) for name in (q, k))
    if q_found is None or k_found is None:
        return Reason("other-code", "its forward doesn't normalise queries and keys by head, without a condition")
    (q_at, q_norm, q_input, heads_at), (k_at, k_norm, k_input, k_heads_at) = q_found, k_found
    replaced = {q_at: _assign(q, q_input, body[q_at]), k_at: _assign(k, k_input, body[k_at])}
    between = [replaced.get(at, statement) for at, statement in enumerate(body[:end]) if at > min(replaced)]
    if heads_at != k_heads_at or not all(map(_is_plain, between)) or any(me in _stored(s) for s in between):
        return Reason("other-code", "between its norms and its rotation stands more than plain assignments")
    mentioned = [_mentioned(s) for s in between]
    of_k = max(replaced) - min(replaced) - 1  # that one is about the other name, and may use its own
    own = k if k_at > q_at else q
    if any(names & {q, k} for at, names in enumerate(mentioned) if at != of_k) or mentioned[of_k] & ({q, k} - {own}):
        return Reason("other-code", "its forward uses the normalised queries or keys before it rotates them")
    if any(_mentioned(inner) & {q, k} for inner in _functions(tree)):
        return Reason("other-code", "a function in its forward may use the normalised queries or keys")
    call = _call(_child(me, q_norm), _child(me, k_norm), function, *(_load(name) for name in (q, k)), *tables)
    fused = _placed(ast.Assign([_names(q, k)], call, lineno=body[end].lineno), body[end])
    before = [replaced.get(at, statement) for at, statement in enumerate(body[:end])]
    return Found((q_norm, k_norm), [*before, fused, *body[end + 1 :]], function.id, heads_at)


# --- parts of a tree --------------------------------------------------------------------------------------------------


def _self(tree: ast.FunctionDef) -> str:
    positional = [*tree.args.posonlyargs, *tree.args.args]
    return positional[0].arg if positional else ""


def _assigned(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """Name and value of ``name = value``."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return (target.id, statement.value) if isinstance(target, ast.Name) else None
    return None


def _is_name(value: ast.expr, name: str) -> bool:
    return isinstance(value, ast.Name) and value.id == name


def _called_child(value: ast.expr, me: str) -> tuple[str, ast.expr] | None:
    """The child's name and the argument of ``self.child(argument)``."""
    if not isinstance(value, ast.Call) or value.keywords or len(value.args) != 1:
        return None
    function = value.func
    if isinstance(function, ast.Attribute) and _is_name(function.value, me) and "norm" in function.attr:
        return function.attr, value.args[0]
    return None


def _rotation(statement: ast.stmt) -> tuple[str, str, ast.Name, list[ast.expr]] | None:
    """Of ``q, k = function(q, k, cos, sin)``: the names, the function, and the tables."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target, call = statement.targets[0], statement.value
    if not isinstance(target, ast.Tuple) or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return None
    names = [element.id for element in target.elts if isinstance(element, ast.Name)]
    if len(names) != 2 or names[0] == names[1] or len(call.args) != 4 or call.keywords:
        return None
    same = all(map(_is_name, call.args[:2], names)) and all(isinstance(table, ast.Name) for table in call.args[2:])
    return (names[0], names[1], call.func, call.args[2:]) if same else None


def _last_norm(body: Statements, name: str, me: str) -> tuple[int, str, ast.expr, int] | None:
    """Where a name gets its last value, if that is a norm's: place, norm, its argument, the heads' dimension there."""
    places = [at for at, s in enumerate(body) if any(stored == name for stored in _stored(s))]
    assigned = _assigned(body[places[-1]]) if places else None
    if assigned is None:
        return None
    value, heads_at = assigned[1], 1
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "transpose":
        moved = [argument.value for argument in value.args if isinstance(argument, ast.Constant)]
        if sorted(map(str, moved)) != ["1", "2"] or value.keywords:
            return None
        value, heads_at = value.func.value, 2
    found = _called_child(value, me)
    return None if found is None else (places[-1], *found, heads_at)


def _stored(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node.id


def _mentioned(tree: ast.AST) -> set[str]:
    """The names that are read or written."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Those within one: whoever calls them reads the names of then."""
    inner = (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef)
    return (node for node in ast.walk(tree) if isinstance(node, inner) and node is not tree)


_IN_PLACE = ("inplace", "out")
"""Arguments by which a function is told to write into another."""


def _is_plain(statement: ast.stmt) -> bool:
    """Whether it is ``names = value`` without a call of what writes in place, by its name or an argument's."""
    if not isinstance(statement, ast.Assign):
        return False
    targets = [node for target in statement.targets for node in ast.walk(target)]
    nodes = list(ast.walk(statement))
    by_name = any(isinstance(node, ast.Attribute) and node.attr.endswith("_") for node in nodes)
    by_argument = any(isinstance(node, ast.keyword) and node.arg in _IN_PLACE for node in nodes)
    names_alone = all(isinstance(node, (ast.Name, ast.Tuple, ast.expr_context)) for node in targets)
    return names_alone and not by_name and not by_argument


# --- making one -------------------------------------------------------------------------------------------------------


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _child(me: str, name: str) -> ast.expr:
    return ast.Attribute(_load(me), name, ast.Load())


def _names(*names: str) -> ast.Tuple:
    return ast.Tuple([ast.Name(name, ast.Store()) for name in names], ast.Store())


def _call(*arguments: ast.expr) -> ast.Call:
    return ast.Call(_load(FUSED), list(arguments), [])


def _assign(name: str, value: ast.expr, at: ast.stmt) -> ast.stmt:
    return _placed(ast.Assign([ast.Name(name, ast.Store())], value, lineno=at.lineno), at)


def _placed(statement: ast.stmt, at: ast.stmt) -> ast.stmt:
    """With the lines of the statement that it replaces, which an error's traceback shows."""
    return ast.fix_missing_locations(ast.copy_location(statement, at))

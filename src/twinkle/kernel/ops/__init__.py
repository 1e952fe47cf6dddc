"""The ops, one package per family: ``__init__`` registers, ``reference`` is the maths, each further file is a backend.

An op's reference module tells what a place in a model computes, so that a kernel is chosen by maths and not by name:

- ``probe(site) -> variant | Reason``: what the site computes, as a frozen record; a Reason when it isn't this op.
- ``build(variant) -> implementation``: the maths itself as a layer class or function; ``compute_dtype=torch.float64``
  gives the judge's version of it.
- ``example(site, variant) -> Example``: small inputs to compare two implementations on.
- ``called_children(variant) -> names``: which of a module's children every kernel calls. Past the others it goes, with
  their hooks asked for at each call; without it, past all of them.
- ``REPLACES``: ``"function"`` when the op takes the place of functions; without it, it takes that of methods.
- ``original``: what kernels are compared with where no model shows it: of an op with a logical name, whose places its
  installer finds, or one whose places only other versions of transformers have.
- ``places() -> [(model, keys)]``: small models, and keys of a mapping that name the op's places in them. Only for an op
  that the default mapping doesn't give to the presets, so that a backend of it can be verified by itself.

Importing this package registers the ops and imports neither torch nor any backend.
"""

from __future__ import annotations

from twinkle.kernel.ops import causal_lm_loss, derived, fla, fused_norms, glu, moe, rms_norm, rotary, sdpa_attention

__all__ = ["causal_lm_loss", "derived", "fla", "fused_norms", "glu", "moe", "rms_norm", "rotary", "sdpa_attention"]

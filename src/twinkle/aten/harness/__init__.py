"""The checks of an operator at three levels, on one device at a time.

- ``levels``: the levels by name, and what an operator's own files make of them. ``kernel_level``, ``op_level`` and
  ``framework_level`` are these, ``vllm_engine`` is the last one in vLLM instead of transformers.
- ``listed``, ``cases``, ``fills``: the calls that an author lists: read, made, and filled with numbers.
- ``unlisted``, ``remembered``: calls that no author lists; and what conditions look at.
- ``observe``, ``compare``, ``poison``: all that a caller could notice of a call; whether two results are the same;
  memory in which shows what wasn't written.
- ``outcome``, ``places``, ``report``, ``time_limit``: what was found; in which line it is to be mended; kept as a page;
  and never waited for in vain.
- ``golden``: calls and results in files. ``packaging``: both ways in which an operator is imported.
- ``model_main``, ``packaging_main``, ``vllm_main``: what the above run in processes of their own.
"""

"""The work of the command ``twinkle-kernel``: one module per command (``demo`` is a package), and what they share.

- ``console``: output, progress bars and errors for people.
- ``options``: the values of ``--device``, ``--dtype`` and ``--backend``.
- ``invocation``: how a command's work is run and ends; ``twinkle.exits`` has the codes it ends with.
- ``models``: from the argument MODEL to a model.
- ``comparison``: what ``verify`` finds out.

Each command's ``run`` returns the exit code. Importing these modules imports neither torch nor transformers.
"""

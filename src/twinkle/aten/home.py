"""Where an operator's files are, and how they are imported: as a package's, or from a folder on the path."""

from __future__ import annotations

import importlib
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle.aten.errors import RegistrationError
from twinkle.reasons import did_you_mean

_MADE_UP = "_script_mode_"


@dataclass(frozen=True)
class Home:
    """An operator's folder, as the package that its files are imported from.

    Attributes:
        package: ``ops.clone`` in package mode. In script mode, where ``register.py`` is a module without a package, one
            made up for that folder. So a bare name such as ``kernel``, which another folder on the path may have as
            well, is never imported.
        folder: the folder itself.
    """

    package: str
    folder: Path

    @property
    def is_script(self) -> bool:
        """Whether the package is made up."""
        return self.package.startswith(_MADE_UP)

    @classmethod
    def of(cls, module: str, file: str) -> Home:
        """The home of the file that calls this with its own ``__name__`` and ``__file__``."""
        folder = Path(file).resolve().parent
        package, _, _ = module.rpartition(".")
        if package:
            return cls(package, folder)
        package = f"{_MADE_UP}{folder.name}"
        made_up = types.ModuleType(package, f"The folder {folder}, which is on the path as a script's.")
        made_up.__path__ = [str(folder)]
        sys.modules[package] = made_up
        # A file that imports this one through the package gets it, not a second copy.
        sys.modules[f"{package}.{Path(file).stem}"] = sys.modules[module]
        return cls(package, folder)

    def load(self, path: str) -> Any:
        """``"kernel.triton_level:clone_triton"``: that attribute of that file of this folder, imported when needed.

        Raises:
            RegistrationError: there is no such file, or nothing of the name in it. What importing it raises is raised.
        """
        module, _, attribute = path.partition(":")
        name = f"{self.package}.{module}"
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # something that the file imports
            file = self.folder.joinpath(*module.split(".")).with_suffix(".py")
            others = [each.stem for each in file.parent.glob("*.py")]
            raise self._error(f"{path!r}: there is no file {file}{did_you_mean(file.stem, others)}") from None
        if not hasattr(found, attribute):
            raise self._error(f"{path!r}: no {attribute} in {found.__file__}{did_you_mean(attribute, vars(found))}")
        return getattr(found, attribute)

    def _error(self, text: str) -> RegistrationError:
        return RegistrationError.of(self.folder.name, "bad-spec", text)


def spec_beside(module: str, folder: Path) -> Any:
    """The ``SPEC`` of the ``register.py`` in an operator's folder, for that folder's own files.

    Args:
        module: the ``__name__`` of the file that asks; one without a package is a script's.
        folder: the operator's.
    """
    package = module.rpartition(".")[0].removesuffix(".test")
    if package:
        return importlib.import_module(f"{package}.register").SPEC
    sys.path.insert(0, str(folder))
    found = importlib.import_module("register").SPEC
    if found.home.folder != folder:
        raise ImportError(f"{found.name} is in script mode in this process already, so {folder.name} can't be")
    return found

"""Where a new operator's package goes, and what it is imported as."""

from __future__ import annotations

import importlib.util
import keyword
from dataclasses import dataclass
from pathlib import Path

from twinkle.aten.errors import RegistrationError


@dataclass(frozen=True)
class Place:
    """The folder of a project's operators.

    Attributes:
        folder: where each operator gets a folder of its name.
        package: what the folder is imported as: ``ops``, ``chip_ops``, ``chip.ops``.
        root: the folder that has to be on the path for that.
    """

    folder: Path
    package: str
    root: Path

    @classmethod
    def of(cls, folder: Path) -> Place:
        """That folder's: it belongs to the package around it, if there is one.

        Raises:
            RegistrationError: Python has no names such as one of these folders'.
        """
        found = folder.resolve()
        names, root = [found.name], found.parent
        while (root / "__init__.py").is_file():
            names.insert(0, root.name)
            root = root.parent
        for name in names:
            if not name.isidentifier() or keyword.iskeyword(name):
                text = f"{folder} can't be imported from: {name!r} is no name that a package can have in Python"
                raise RegistrationError.of("new", "bad-argument", text, "another --folder, such as chip_ops")
        return cls(folder, ".".join(names), root)

    @property
    def project(self) -> Path:
        """The ``pyproject.toml`` of the distribution that has the package, there or not."""
        return (self.root.parent if self.root.name == "src" else self.root) / "pyproject.toml"

    def module(self, operator: str) -> str:
        """``chip_ops.mish``, of the operator ``mish``."""
        return f"{self.package}.{operator}"

    def path(self, operator: str) -> str:
        """``chip_ops/mish``: the operator's folder, from the project's on."""
        return (self.folder.resolve().relative_to(self.project.parent) / operator).as_posix()

    def value(self, operator: str) -> str:
        """What the operator's entry point says."""
        return f"{self.module(operator)}.register:SPEC"

    def hidden_by(self) -> str | None:
        """Another package of the name, which is found before this one: as ``ops`` is where it is installed."""
        try:
            found = importlib.util.find_spec(self.package)
        except (ImportError, ValueError):
            return None
        places = [] if found is None else list(found.submodule_search_locations or ())
        if not places or self.folder.resolve() in [Path(place).resolve() for place in places]:
            return None
        return places[0]

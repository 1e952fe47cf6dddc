"""The pages about engines and trainers: the variables on them are those of the code."""

from __future__ import annotations

import re

import pytest

from tests.support.markdown import LANGUAGES, page
from twinkle.engines import activation


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_variable_is_there(language: str) -> None:
    shown = re.findall(r"^\| `(TWINKLE_\w+)` \|", page(language, "engines.md"), re.MULTILINE)
    assert shown == [activation.OPERATORS, activation.PLATFORM, activation.FOLDER, activation.ON_ERROR]

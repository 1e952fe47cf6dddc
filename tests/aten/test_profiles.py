"""Device profiles: what the files say, and what is said about wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinkle.aten import profile, profiles
from twinkle.aten import profiles as function
from twinkle.aten.keys import platform_here, platforms_meant
from twinkle.platforms import PLATFORMS


def test_every_profile_fits_the_platform_table() -> None:
    found = profiles()
    assert set(found) == {"ascend910", "cambricon", "cpu", "nvidia", "p800-kunlunxin"}
    for made in found.values():
        platform = PLATFORMS[made.platform]
        assert made.dispatch_key in (platform.autograd_key, platform.dispatch_key)
        assert made.found is platform
    names = [name for made in found.values() for name in (made.name, *made.aliases)]
    assert len(names) == len(set(names)), "two profiles answer to one name"


@pytest.mark.parametrize(("alias", "name"), [("mlu590", "cambricon"), ("npu", "ascend910"), ("p800", "p800-kunlunxin")])
def test_one_chip_is_one_profile(alias: str, name: str) -> None:
    assert profile(alias) is not None and profile(alias).name == name


def test_a_profiles_key_feeds_a_registration() -> None:
    made = profile("cpu")
    assert platform_here("clone", made.dispatch_key, platforms_meant("clone", made.dispatch_key, None)).name == "cpu"


def test_an_unknown_profile() -> None:
    with pytest.raises(ValueError, match="unknown device profile 'asend910'; known: ascend910, .*mean 'ascend910'"):
        profile("asend910")


GOOD = {"name": "chip", "platform": "cpu", "dispatch_key": "CPU", "device": "cpu"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"platfrom": "cpu"}, "unknown field 'platfrom'; did you mean 'platform'"),
        ({"platform": "cpx"}, "unknown platform 'cpx'"),
        ({"dispatch_key": "CUDA"}, "dispatch_key 'CUDA' is not cpu's: AutogradCPU or CPU"),
        ({"device": "npu:0"}, "device 'npu:0' is not of cpu's type cpu"),
        ({"name": "other"}, "the name 'other' is not the file's"),
        ({"device": None}, "missing 1 required keyword-only argument: 'device'"),
    ],
)
def test_a_wrong_profile_names_its_file(
    change: dict[str, str | None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    import yaml

    content = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    (tmp_path / "chip.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr(sys.modules[function.__module__], "FOLDERS", (tmp_path,))
    with pytest.raises(ValueError, match=f"chip.yaml: .*{message}"):
        profiles()


def test_a_file_that_is_no_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    (tmp_path / "chip.yaml").write_text("- cpu\n")
    monkeypatch.setattr(sys.modules[function.__module__], "FOLDERS", (tmp_path,))
    with pytest.raises(ValueError, match="chip.yaml: a device profile is a mapping of aliases, device"):
        profiles()

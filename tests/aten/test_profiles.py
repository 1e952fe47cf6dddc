"""Device profiles: what the files say, and what is said about wrong ones."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.aten.conftest import DEVICE, ROOT
from twinkle.aten import Profile, profile, profiles
from twinkle.aten import profiles as function
from twinkle.aten.harness import kernel_level
from twinkle.aten.keys import platform_here, platforms_meant
from twinkle.aten.spec import OperatorSpec
from twinkle.platforms import PLATFORMS

VARIABLE = "TWINKLE_PROFILES"
SHIPPED = {"ascend910", "cambricon", "cpu", "nvidia", "p800-kunlunxin"}


@pytest.fixture(autouse=True)
def no_profiles_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_every_profile_fits_the_platform_table() -> None:
    found = profiles()
    assert set(found) == SHIPPED
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
        ({"platfrom": "cpu"}, "unknown field 'platfrom'; known: .*did you mean 'platform'"),
        ({"platform": "cpx"}, "unknown platform 'cpx'"),
        ({"dispatch_key": "CUDA"}, "dispatch_key 'CUDA' is not cpu's: AutogradCPU or CPU"),
        ({"device": "npu:0"}, "device 'npu:0' is not of cpu's type cpu"),
        ({"name": "other"}, "the name 'other' is not the file's"),
        ({"device": 3}, "device is a word, not 3"),
        ({"device": "cpu:x"}, "device 'cpu:x' has 'x' where its number should be"),
        ({"platform": ["cpu"]}, "platform is a word, not .'cpu'."),
        ({"modes": "native"}, "modes is a mapping of operators to modes, not 'native'"),
        ({5: "cpu"}, "unknown field 5"),
        ({"device": None}, "the field 'device' is missing: a word"),
        ({"modes": {"clon": "auto"}}, "modes names 'clon', which is no operator; known: .*did you mean 'clone'"),
        ({"modes": {3: "auto"}}, "modes names 3, which is no operator"),
        ({"modes": {"clone": "natve"}}, "mode 'natve' of clone is none of auto, triton, native; did you mean 'native'"),
        ({"modes": {"clone": ["auto"]}}, "mode .'auto'. of clone is none of"),
        ({"device": "cpu:99"}, "device 'cpu:99' is never there: all cores together are the device 'cpu'"),
    ],
)
def test_a_wrong_profile_names_its_file(
    change: dict[Any, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    import yaml

    content = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    (tmp_path / "chip.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr(sys.modules[function.__module__], "shipped", lambda name: tmp_path)
    with pytest.raises(ValueError, match=f"chip.yaml: .*{message}"):
        profiles()


@pytest.mark.parametrize("aliases", ["chip", 3, [1]])
def test_aliases_are_a_list_of_names(aliases: object, tmp_path: Path) -> None:
    import yaml

    file = tmp_path / "chip.yaml"
    file.write_text(yaml.safe_dump({**GOOD, "aliases": aliases}))
    with pytest.raises(ValueError, match="chip.yaml: aliases is a list of names"):
        profile(str(file))


def test_a_file_that_is_no_yaml(tmp_path: Path) -> None:
    (tmp_path / "chip.yaml").write_text("name: [cpu\n")
    with pytest.raises(ValueError, match="chip.yaml is no YAML: .*line 2"):
        profile(str(tmp_path / "chip.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device: meta\ndevice: cpu\n", "'device' is there twice, also in line 1 and below"),
        ("modes: {clone: native, clone: auto}\n", "'clone' is there twice"),
        ("name: 2020-13-41\n", "month must be in 1..12"),
        ("[" * 3000, "maximum recursion depth exceeded"),
    ],
)
def test_what_pyyaml_takes_or_raises_of_its_own(text: str, message: str, tmp_path: Path) -> None:
    """Of two lines that say one thing it takes the last."""
    (tmp_path / "chip.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"chip.yaml is no YAML: .*{message}"):
        profile(str(tmp_path / "chip.yaml"))


@pytest.mark.parametrize("name", [None, 3, Path("chip.yaml")])
def test_a_name_is_text(name: Any) -> None:
    with pytest.raises(ValueError, match="a device profile is named, or is a file's path, as text: not "):
        profile(name)


def test_a_file_that_is_no_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    (tmp_path / "chip.yaml").write_text("- cpu\n")
    monkeypatch.setattr(sys.modules[function.__module__], "shipped", lambda name: tmp_path)
    with pytest.raises(ValueError, match="chip.yaml: a device profile is a mapping of name, platform, .*not .'cpu'"):
        profiles()


def test_the_fields_of_a_file_are_those_of_a_profile() -> None:
    import sys

    assert list(sys.modules[function.__module__]._FIELDS) == [field.name for field in dataclasses.fields(Profile)]


def test_modes_of_operators_that_are_not_there_are_an_error_in_programs_too() -> None:
    with pytest.raises(ValueError, match="modes names 'sdpa', which is no operator"):
        dataclasses.replace(profile("cpu"), modes={"sdpa": "native"})


def test_a_device_beyond_those_that_are_there_is_not_run(chip: Profile, clone: OperatorSpec) -> None:
    """What no file can say: how many there are. No level may run on another one instead."""
    if DEVICE == "cpu":
        pytest.skip("there is one CPU, which a profile knows")
    beyond = dataclasses.replace(chip, device=f"{DEVICE}:99")
    outcome = kernel_level.run(clone, beyond)
    assert outcome.state == "not run" and f"device {DEVICE}:99 is not among the " in str(outcome.not_run)


# --- profiles of the user's own ---------------------------------------------------------------------------------------

TEMPLATE = ROOT / "configs" / "devices" / "template.yaml"


def own(folder: Path, **changes: str) -> Path:
    """A profile made of the template as its text says: a copy with another name, and lines of it changed."""
    text = TEMPLATE.read_text()
    for field, value in changes.items():
        text, found = re.subn(rf"(?m)^{field}: .*$", f"{field}: {value}", text)
        assert found == 1, field
    file = folder / f"{changes['name']}.yaml"
    file.write_text(text)
    return file


def test_the_template_is_a_profile_but_none_of_ours() -> None:
    assert "template" not in profiles()
    made = profile(str(TEMPLATE))
    assert made.found.name == made.platform and made.aliases


def test_the_template_explains_every_field() -> None:
    """Each line of it follows a comment of its own; none is missing."""
    lines = TEMPLATE.read_text().splitlines()
    explained = [lines[i].partition(":")[0] for i in range(1, len(lines)) if re.match(r"\w+: ", lines[i])]
    assert sorted(explained) == sorted(field.name for field in dataclasses.fields(Profile))
    assert all(lines[i - 1].startswith("# ") for i in range(len(lines)) if re.match(r"\w+: ", lines[i]))
    text = " ".join(line.removeprefix("# ") for line in lines)
    assert VARIABLE in text and "src/twinkle/platforms.py" in text
    assert all(name in PLATFORMS for name in re.findall(r"(\w+),", text.partition("calls it: ")[2].partition("...")[0]))


def test_a_profile_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clone: OperatorSpec) -> None:
    other = tmp_path / "other"
    other.mkdir()
    changes = {"platform": "cpu", "device": "cpu", "dispatch_key": "CPU"}
    file = own(tmp_path, name="mine", aliases="[my-cpu]", **changes)
    own(other, name="yours", aliases="[]", **changes)
    monkeypatch.setenv(VARIABLE, f"{tmp_path}{os.pathsep}{other}")
    assert set(profiles()) == {*SHIPPED, "mine", "yours"}
    assert profile("mine") == profile("my-cpu") == profile(str(file))
    with clone.register_a1(profile("my-cpu").dispatch_key) as registration:
        assert registration.platform == "cpu"


def test_a_profile_that_takes_anothers_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    own(tmp_path, name="mine", aliases="[mlu590]")
    with pytest.raises(ValueError, match=r"mine.yaml: the name 'mlu590' is taken by .*cambricon.yaml; one chip is one"):
        profiles()


def test_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="TWINKLE_PROFILES names .*missing, which is no folder"):
        profile("cpu")
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ValueError, match="no such device profile: .*gone.yaml"):
        profile(str(tmp_path / "gone.yaml"))

"""Which platform a registration means, at which keys it lands, and every way in which that can fail."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tests.aten.conftest import SIMULATED
from twinkle.aten import Profile, RegistrationError, catalog
from twinkle.aten.keys import effective_keys
from twinkle.aten.registration import active
from twinkle.aten.spec import OperatorSpec
from twinkle.platforms import PLATFORMS, get_platform


def test_the_signature_is_the_same_for_every_operator(spec: OperatorSpec) -> None:
    module = __import__(f"ops.{spec.name}", fromlist=["register_a1"])
    parameters = inspect.signature(module.register_a1).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "dispatch_key": "AutogradPrivateUse1",
        "counter": None,
        "platform": None,
    }
    assert module.register_a1.__func__ is OperatorSpec.register_a1
    assert getattr(module, f"{spec.name}_aten") == spec.aten


# --- the platform -----------------------------------------------------------------------------------------------------


def forms(chip: Profile) -> list[dict[str, str | None]]:
    platform = chip.found
    names: list[str] = [platform.name, *platform.aliases]
    keys = [platform.dispatch_key, platform.autograd_key]
    named = [{"platform": name} for name in names]
    both = [{"dispatch_key": key, "platform": name} for key in keys for name in names]
    return [*named, *both, *({"dispatch_key": key} for key in keys)]


def test_every_form_that_means_this_device(registrable: OperatorSpec, chip: Profile) -> None:
    spec = registrable
    for form in forms(chip):
        with spec.register_a1(**form) as registration:
            assert registration.platform == chip.platform
            assert registration.keys == effective_keys(spec.overload, chip.found)


@pytest.mark.parametrize(
    ("form", "code", "message"),
    [
        ({"platform": "cambrican"}, "unknown-platform", "unknown platform 'cambrican'; known: cpu, .*mean 'cambricon'"),
        ({"dispatch_key": "PrivateUsel"}, "unknown-key", "unknown key 'PrivateUsel'; known: .*mean 'PrivateUse1'"),
        ({"dispatch_key": "Nonsense", "platform": "cpu"}, "unknown-key", "unknown key 'Nonsense'"),
        ({"dispatch_key": "nvidia"}, "unknown-key", "'nvidia'; .*.a platform goes by its name: platform='nvidia'"),
        ({"dispatch_key": "NPU"}, "unknown-key", "a platform goes by its name: platform='npu'"),
        ({"platform": "AutogradCUDA"}, "unknown-platform", "that is a key: dispatch_key='AutogradCUDA'"),
        ({"platform": 5}, "bad-argument", "a platform's name is a string, not 5"),
        ({"dispatch_key": ["CPU"]}, "bad-argument", "a key is a string, not"),
        ({"counter": []}, "bad-argument", "a counter is a dictionary"),
        ({"counter": {"n": None}}, "bad-argument", "whose 'n' is a whole number, not"),
        ({"dispatch_key": "Autograd"}, "refused-key", "the autograd keys of all backends"),
        ({"dispatch_key": "Autograd", "platform": "cpu"}, "refused-key", "the autograd keys of all backends"),
        ({"dispatch_key": "Meta"}, "refused-key", "meta tensors have no data"),
        ({"dispatch_key": "CompositeImplicitAutograd"}, "refused-key", "not one backend's key"),
        ({"dispatch_key": "CompositeExplicitAutograd"}, "refused-key", "not one backend's key"),
        ({"dispatch_key": "CUDA", "platform": "cpu"}, "foreign-key", "whose keys are AutogradCPU and CPU"),
        ({"dispatch_key": "CPU", "platform": "ascend"}, "foreign-key", "AutogradPrivateUse1 and PrivateUse1"),
        pytest.param(
            {"dispatch_key": "CUDA"},
            "no-device",
            "nvidia: .*; amd: .*; kunlunxin: the package torch_xmlir",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the key means the GPU that is here"),
        ),
        ({"platform": "kunlunxin"}, "no-device", "no kunlunxin .cuda. on this machine: the package torch_xmlir"),
        ({"platform": "apple"}, "no-device", "torch.mps.is_available.. is False"),
    ],
)
def test_what_is_refused(registrable: OperatorSpec, form: dict[str, Any], code: str, message: str) -> None:
    spec = registrable
    with pytest.raises(RegistrationError, match=f"^{spec.name}: .*{message}") as refused:
        spec.register_a1(**form)
    assert refused.value.code == code and isinstance(refused.value, RuntimeError)
    assert active() == []


@pytest.mark.skipif(SIMULATED, reason="with an out-of-tree device its keys are accepted")
@pytest.mark.parametrize("form", [{}, {"dispatch_key": "PrivateUse1"}, {"platform": "cambricon"}, {"platform": "npu"}])
def test_an_out_of_tree_device_that_is_not_here(clone: OperatorSpec, form: dict[str, str]) -> None:
    with pytest.raises(RegistrationError, match="the package torch_(npu|mlu) is not installed") as refused:
        clone.register_a1(**form)
    assert refused.value.code == "no-device"


def test_a_key_of_two_platforms_asks_which(clone: OperatorSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia", "kunlunxin"):
        monkeypatch.setattr(type(PLATFORMS[name]), "missing", lambda self: None if self.name != "amd" else "not here")
    with pytest.raises(RegistrationError, match="CUDA stands for nvidia and kunlunxin here .say which: platform=") as e:
        clone.register_a1("CUDA")
    assert e.value.code == "ambiguous-key"


# --- effective keys ---------------------------------------------------------------------------------------------------

BACKEND, AUTOGRAD = "PrivateUse1", "AutogradPrivateUse1"


@pytest.mark.parametrize(
    ("operator", "plain", "skipping"),
    [
        ("clone", (BACKEND,), (AUTOGRAD, BACKEND)),
        ("copy_", (BACKEND,), (AUTOGRAD, BACKEND)),
        ("embedding", (BACKEND,), (AUTOGRAD, BACKEND)),
        ("empty_like", (BACKEND,), (AUTOGRAD, BACKEND)),
        ("empty_strided", (BACKEND,), (BACKEND,)),
        ("contiguous", (AUTOGRAD, BACKEND), (AUTOGRAD, BACKEND)),
        ("dropout", (AUTOGRAD, BACKEND), (AUTOGRAD, BACKEND)),
        ("type_as", (AUTOGRAD, BACKEND), (AUTOGRAD, BACKEND)),
        ("item", (AUTOGRAD, BACKEND), (AUTOGRAD, BACKEND)),
        ("_local_scalar_dense", (BACKEND,), (AUTOGRAD, BACKEND)),
        ("detach", (BACKEND,), (AUTOGRAD, BACKEND)),
        ("linear", (AUTOGRAD,), (AUTOGRAD,)),
        ("matmul", (AUTOGRAD,), (AUTOGRAD,)),
    ],
)
def test_where_an_operator_is_installed(operator: str, plain: tuple[str, ...], skipping: tuple[str, ...]) -> None:
    overload = getattr(torch.ops.aten, operator).default
    assert effective_keys(overload, get_platform("cambricon")) == plain
    assert effective_keys(overload, get_platform("ascend")) == skipping


# --- the schema -------------------------------------------------------------------------------------------------------


def test_another_schema_than_the_kernels_were_written_for(clone: OperatorSpec) -> None:
    import dataclasses

    other = dataclasses.replace(clone, schema="clone(Tensor self) -> Tensor")
    with pytest.raises(RegistrationError, match=r"another schema .*: clone\(Tensor self, \*, .*written for") as refused:
        other.register_a1(platform="cpu")
    assert refused.value.code == "schema"
    missing = dataclasses.replace(clone, schema="no_such_operator(Tensor self) -> Tensor")
    with pytest.raises(RegistrationError, match="written for: none"):
        missing.register_a1(platform="cpu")


ATTENTION = "scaled_dot_product_attention"


def test_the_catalog() -> None:
    ten = "clone contiguous copy_ type_as dropout empty_like empty_strided item _local_scalar_dense detach"
    assert {*ten.split(), "empty", "detach_", "result_type", "embedding", ATTENTION} <= set(catalog.names())
    with pytest.raises(RegistrationError, match="known: .*clone, .*did you mean 'clone'") as refused:
        catalog.operator("clones")
    assert refused.value.code == "unknown-operator"

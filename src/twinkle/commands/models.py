"""From the argument MODEL to a model: a preset, a folder, a config.json file or a Hub id.

Weights are never read or downloaded: ``plan`` needs none and ``verify`` draws its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.commands.console import CommandError, first_line
from twinkle.reasons import did_you_mean

if TYPE_CHECKING:
    import torch

PRESET_PREFIX = "tiny:"


@dataclass(frozen=True)
class ModelSource:
    """A model that can be built: either a preset's name, or a configuration.

    Attributes:
        argument: what the user wrote, for messages.
        preset: name of a preset of :mod:`twinkle.presets`, or None.
        config: a transformers configuration, or None.
    """

    argument: str
    preset: str | None = None
    config: Any = None

    def on_meta(self, dtype: torch.dtype | None, layers: int | None = None) -> Any:
        """The model without values: parameters on the meta device.

        Raises:
            CommandError: transformers can't build it.
        """
        import torch

        from twinkle import presets

        with self._building():
            if self.preset is not None:
                return presets.build(self.preset, dtype=dtype, device="meta", **_layers_override(layers))
            with torch.device("meta"):
                return self._from_config(dtype, layers)

    def with_random_weights(self, dtype: torch.dtype, device: str, layers: int | None = None) -> Any:
        """The model in evaluation mode, the same weights for every call on a device, where they are drawn.

        Raises:
            CommandError: transformers can't build it.
        """
        import torch

        from twinkle import presets

        with self._building():
            if self.preset is not None:
                return presets.build(self.preset, dtype=dtype, device=device, **_layers_override(layers))
            with _seeded(torch.device(device)), torch.device(device):
                model = self._from_config(dtype, layers)
                presets.make_nontrivial(model)
            return model.to(device).eval()

    def _from_config(self, dtype: torch.dtype | None, layers: int | None) -> Any:
        import copy

        config = copy.deepcopy(self.config)
        if layers is not None:
            cut_layers(config, layers)
        return auto_class(config).from_config(config, dtype=dtype or config.dtype)

    @contextmanager
    def _building(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a config can be wrong in ways that only the model's code notices
            raise CommandError(
                f"{self.argument}: transformers can't build this model: {type(error).__name__}: {first_line(error)}"
            ) from error


@contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """The CPU's and the device's random numbers begin at the same place within, and go on as before afterwards."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        if device.type == "cpu":
            yield
            return
        numbers = torch.get_device_module(device)
        with torch.accelerator.device_index(device.index):
            before = numbers.get_rng_state()
            numbers.manual_seed(0)
            try:
                yield
            finally:
                numbers.set_rng_state(before)


def _layers_override(layers: int | None) -> dict[str, int]:
    return {} if layers is None else {"num_hidden_layers": layers}


def cut_layers(config: Any, layers: int) -> None:
    """Cuts a configuration to its first layers (of its text part), settings with one value a layer included."""
    text = config.get_text_config()
    full = getattr(text, "num_hidden_layers", None)
    if full is None or full <= layers:
        return
    for name, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == full:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers


def auto_class(config: Any) -> Any:
    """The most complete class that transformers has for a configuration: with a language head where there is one."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel


def find_model(argument: str) -> ModelSource:
    """What MODEL names.

    Raises:
        CommandError: transformers is missing, or there is no such preset, folder, file or Hub id, or its configuration
            is none that this transformers knows.
    """
    if argument.startswith(PRESET_PREFIX):
        preset = _preset(argument.removeprefix(PRESET_PREFIX))
        require_transformers()
        return ModelSource(argument, preset=preset)
    path = Path(argument).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise CommandError(
                f"the folder {argument} has no config.json; give the folder of a transformers checkpoint, "
                f"or {PRESET_PREFIX}<preset> to try without one"
            )
    require_transformers()
    if not path.is_file():
        path = _from_hub(argument)
    return ModelSource(argument, config=_read_config(argument, path))


def check_memory(
    source: ModelSource, dtype: torch.dtype, device: str, layers: int | None, bytes_each: int, needing: str
) -> None:
    """Refuses a model that this machine can't hold, before it is built.

    Args:
        bytes_each: what a parameter takes in all.
        needing: how the message says what for.

    Raises:
        CommandError: it needs more memory than is free.
    """
    parameters = sum(parameter.numel() for parameter in source.on_meta(dtype, layers).parameters())
    needed, free = parameters * bytes_each, _free_memory(device)
    if free is not None and needed > free:
        raise CommandError(
            f"{source.argument} has {parameters / 1e9:.1f} billion parameters here: {needing} {needed / 1e9:.0f} GB, "
            f"{free / 1e9:.0f} GB are free on {device}; build fewer layers with --layers"
        )


def _free_memory(device: str) -> int | None:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on this system
        return None


def require_transformers() -> None:
    """
    Raises:
        CommandError: transformers is missing or broken; the message has the command that installs it.
    """
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise CommandError(
            f"this command needs transformers ({first_line(error)}): pip install 'twinkle-kernel[transformers]'"
        ) from error


def _preset(name: str) -> str:
    from twinkle.presets import PRESETS

    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or f"; known: {', '.join(sorted(PRESETS))}"
        raise CommandError(f"unknown preset {name!r}{hint}")
    return name


def _from_hub(argument: str) -> Path:
    """The config.json of a Hub id, from the cache or fetched; the only file that is."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.utils import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    from twinkle.presets import PRESETS

    looks_like_path = argument.startswith((".", "/", "~")) or argument.endswith(".json") or argument.count("/") > 1
    if looks_like_path or os.sep != "/" and os.sep in argument:
        raise CommandError(f"no such file or folder: {argument}")
    if "/" not in argument and (argument in PRESETS or (near := did_you_mean(argument, PRESETS))):
        hint = f"did you mean {PRESET_PREFIX}{argument}?" if argument in PRESETS else near.removeprefix("; ")
        raise CommandError(f"{argument!r} is no file, no folder and no Hub id (owner/name); {hint}")
    try:
        return Path(hf_hub_download(argument, "config.json", local_files_only=not _hub_answers(constants.ENDPOINT)))
    except HFValidationError:
        raise CommandError(f"{argument!r} is no file, no folder and no Hub id (owner/name)") from None
    except LocalEntryNotFoundError:
        raise CommandError(
            f"{argument}: the Hub can't be reached and the config isn't in the local cache; "
            "give a folder with config.json, or go online once"
        ) from None
    except HfHubHTTPError as error:
        raise CommandError(
            f"{argument}: the Hub gives no config.json ({type(error).__name__}: {first_line(error)}); "
            "check the id, or log in with `hf auth login` where it is private or gated"
        ) from None


def _hub_answers(endpoint: str) -> bool:
    """Whether the Hub can be reached. Asked once and shortly: the client itself would try for half a minute."""
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=5)
    except Exception:  # whatever the network and its proxies come up with
        return False
    return True


def _read_config(argument: str, path: Path) -> Any:
    """The configuration in a file, as transformers' own class."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} can't be read as JSON: {first_line(error)}") from error
    model_type = settings.get("model_type") if isinstance(settings, dict) else None
    if not isinstance(model_type, str):
        raise CommandError(f"{path} names no model_type, so it is no transformers model config")
    if model_type not in CONFIG_MAPPING:
        own_code = "; it brings code of its own, which this command doesn't run" if settings.get("auto_map") else ""
        raise CommandError(
            f"{argument}: transformers {transformers.__version__} doesn't know the model type {model_type!r}{own_code}"
            f"{did_you_mean(model_type, list(CONFIG_MAPPING))}; a newer one may: pip install --upgrade transformers"
        )
    try:
        return transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:
        raise CommandError(f"{path} is no valid {model_type} config: {first_line(error)}") from error

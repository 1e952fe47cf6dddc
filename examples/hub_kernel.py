"""A kernel of the Hugging Face Hub; here from a repository on disk, so that it runs without a network.

python examples/hub_kernel.py

Needs the extra "hub". With a network, leave make_repository out and name a repository of the Hub.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from twinkle import presets
from twinkle.kernel import hub, kernelize
from twinkle.kernel.report import plan, report
from twinkle.kernel.undo import unkernelize

LAYERS = """
import torch.nn.functional as F
from torch import nn

class RMSNorm(nn.Module):
    can_torch_compile = True

    def forward(self, hidden_states):
        return F.rms_norm(hidden_states, hidden_states.shape[-1:], self.weight, self.variance_epsilon)
"""


def make_repository(folder: Path) -> None:
    """The layout that the package kernels loads: a folder per build, with a Python package in it."""
    package = folder / "build" / "torch-cpu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from . import layers\n")
    (package / "layers.py").write_text(LAYERS)
    metadata = {"id": "my_norms", "name": "my-norms", "version": 1, "license": "Apache-2.0", "python-depends": []}
    (package / "metadata.json").write_text(json.dumps({**metadata, "backend": {"type": "cpu"}}))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_repository(Path(folder))
        os.environ["LOCAL_KERNELS"] = f"me/norms={folder}"  # of kernels: this repository is on disk
        model = presets.build("qwen3")
        mapping = {"transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm": hub("me/norms", "RMSNorm", version=1)}
        print(plan(model, mapping).rows[0].implementation)  # a plan never fetches
        kernelize(model, mapping, strict=True, verify=True)  # fetched, checked against the instances, compared
        model(**presets.inputs(model))
        print(report(model).table())
        unkernelize(model)
        del os.environ["LOCAL_KERNELS"]


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Random weights created on the device, for a model folder that contains only config.json."""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from quire_engine.models import base
from quire_engine.weights.param_shard import LoadTarget, unsharded


def patch_weight_loading() -> contextlib.AbstractContextManager[Any]:
    """Let engines that are created in this block fill their weights with random numbers."""
    return mock.patch.object(base, "load_weights", _fill_randomly)


def _fill_randomly(folder: Path, tensors: Iterable[tuple[str, LoadTarget]], **_: Any) -> None:
    """Normally distributed, norms around 1; every square linear keeps the deviation of its inputs, and the deviation of
    the logits is 1."""
    spread = json.loads((folder / "config.json").read_text())["hidden_size"] ** -0.5
    torch.manual_seed(0)
    with torch.inference_mode():
        for name, target in tensors:
            unsharded(target).tensor.normal_(1.0 if "norm" in name else 0.0, spread)

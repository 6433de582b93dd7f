# SPDX-License-Identifier: Apache-2.0
"""Devices with programmatic dependent launch."""

import pytest
import torch
import triton

from quire_kernels.gpu.pdl import supports_pdl


@pytest.mark.parametrize(
    ("device", "capability", "interpreted", "wanted", "expected"),
    [
        ("cuda", (9, 0), False, None, True),
        ("cuda", (10, 0), False, "1", True),
        ("cuda", (9, 0), False, "0", False),
        ("cuda", (8, 9), False, None, False),
        ("cuda", (9, 0), True, None, False),
        ("cpu", (9, 0), False, None, False),
    ],
)
def test_supported_on_hopper_with_compiled_kernels(monkeypatch, device, capability, interpreted, wanted, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", interpreted)
    if wanted is not None:
        monkeypatch.setenv("QUIRE_EARLY_LAUNCH", wanted)
    assert supports_pdl.__wrapped__(torch.device(device)) is expected


def test_not_supported_on_amd(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 4))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not supports_pdl.__wrapped__(torch.device("cuda"))

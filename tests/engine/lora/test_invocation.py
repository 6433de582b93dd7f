# SPDX-License-Identifier: Apache-2.0
"""The start of an adapter with an invocation equals the offset that PEFT computes."""

from types import SimpleNamespace

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from peft.tuners.lora.variants import calculate_alora_offsets

from quire_engine.lora.invocation import NEVER, adapter_start

# In 64 bits each, 256 and 1 contain each other's bytes at other places.
TOKENS = st.lists(st.sampled_from([0, 1, 256, 257, 65536]), min_size=1, max_size=12)


@given(prompt=TOKENS, invocation=st.lists(st.sampled_from([0, 1, 256, 257]), min_size=1, max_size=3))
@example(prompt=[0, 0, 0], invocation=[0, 0])
@example(prompt=[256, 0, 1], invocation=[1, 0])
def test_start_is_that_of_peft(prompt, invocation):
    config = {"a": SimpleNamespace(alora_invocation_tokens=invocation)}
    [offset] = calculate_alora_offsets(config, "a", torch.tensor([prompt]))
    assert adapter_start(prompt, invocation) == (NEVER if offset is None else len(prompt) - offset)


def test_an_adapter_without_invocation_starts_at_once():
    assert adapter_start([1, 2], ()) == 0

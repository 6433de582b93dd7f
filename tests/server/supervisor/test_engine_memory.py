# SPDX-License-Identifier: Apache-2.0
"""The default environment of the engine processes bounds their memory."""

import os
import subprocess
import sys

from quire_server.supervisor.engine_process import ENGINE_ENV

GROWTH = """
import psutil, torch
from quire_kernels.linear import linear, pack_weight
weight, x = pack_weight(torch.randn(576, 576)), torch.randn(600, 576)
own = psutil.Process().memory_full_info
with torch.inference_mode():
    linear(x, weight, None)
    before = own().uss
    for num_tokens in range(1, 601):
        linear(x[:num_tokens], weight, None)
print(own().uss - before)
"""


def growth(env):
    """Return the growth in bytes of a process that multiplies 600 numbers of tokens by one weight, in float32."""
    argv = [sys.executable, "-c", GROWTH]
    return int(subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout)


def test_engine_env_bounds_caches_of_compiled_products():
    env = {name: value for name, value in os.environ.items() if name not in ENGINE_ENV}
    assert growth(env | ENGINE_ENV) < 0.7 * growth(env)

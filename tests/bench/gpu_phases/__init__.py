# SPDX-License-Identifier: Apache-2.0
"""The measuring driver for one GPU: its phases, the supervisor that runs them in processes, and the table of results.

`tests/bench/gpu.py` is the command. `plan` lists the phases; `supervisor` runs each in `process`, and retries it down
the `ladder`; `store` keeps the rows of every attempt; `table` merges them, and compares them with `bars`.
"""

# SPDX-License-Identifier: Apache-2.0
"""From a model, a GPU and a spec to the numbers that an engine starts with. Pure but for files.py."""

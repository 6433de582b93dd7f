# SPDX-License-Identifier: Apache-2.0
"""Version of the installed package."""

from importlib.metadata import version

VERSION = version("quire-llm")
"""Read once, because each reading parses the whole description of the package."""

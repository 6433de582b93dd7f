# SPDX-License-Identifier: Apache-2.0
"""Fixtures of source readers, for downloads."""

from support.source_fixtures import isolated_sources, web  # noqa: F401

# SPDX-License-Identifier: Apache-2.0
"""Fixtures of source readers, for downloads."""

from support.source_fixtures import isolated_sources, serve, web  # noqa: F401

# SPDX-License-Identifier: Apache-2.0
"""Models that read images."""

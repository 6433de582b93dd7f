# SPDX-License-Identifier: Apache-2.0
"""From what is observed to what is written: one service at a time, over and over, until nothing differs."""

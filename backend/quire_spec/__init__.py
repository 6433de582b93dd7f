# SPDX-License-Identifier: Apache-2.0
"""What every part of Quire agrees on: configuration, names, messages, documents. Standard library only."""

# SPDX-License-Identifier: Apache-2.0
"""Division of a model between ranks: between the tensor-parallel ranks of a stage, and between pipeline stages."""

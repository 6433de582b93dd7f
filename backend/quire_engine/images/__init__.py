# SPDX-License-Identifier: Apache-2.0
"""Images of prompts: what a model can read, the processor of a checkpoint, and the places of images in a prompt."""

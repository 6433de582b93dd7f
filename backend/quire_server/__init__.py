# SPDX-License-Identifier: Apache-2.0
"""Processes of a pod other than the engine: the pod supervisor, the server's models, and the download programs."""

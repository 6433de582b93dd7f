# SPDX-License-Identifier: Apache-2.0
"""The processes of a pod, except for the engine: the pod supervisor, the server's models, and the download programs."""

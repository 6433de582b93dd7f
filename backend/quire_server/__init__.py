# SPDX-License-Identifier: Apache-2.0
"""What runs beside the engine in a pod: the server's models, and the supervisor of all processes."""

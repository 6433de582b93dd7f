# SPDX-License-Identifier: Apache-2.0
"""Images of requests in the text process."""

# SPDX-License-Identifier: Apache-2.0
"""Reads object stores. obstore signs a URL for each request, and the HTTP client of all readers sends it."""

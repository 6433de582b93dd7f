# SPDX-License-Identifier: Apache-2.0
"""Reads files of models and adapters from folders, the Hugging Face hub, HTTP servers and S3 buckets."""

# SPDX-License-Identifier: Apache-2.0
"""Makes the checks of rendered objects fast."""

import functools

from kubernetes_validate import utils

# `validate` reads the schemas of all kinds from the disk in each call, which takes 40 ms.
utils.schema_contents = functools.cache(utils.schema_contents)

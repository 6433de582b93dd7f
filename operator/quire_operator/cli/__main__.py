# SPDX-License-Identifier: Apache-2.0
"""`python -m quire_operator.cli`: the `quire` command."""

import sys

from quire_operator.cli.main import main

sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""What the installed script `quire` calls."""

from quire_spec import starting


def main() -> int:
    """The command; returns the exit status."""
    starting.quietly()
    # The rest of the imports, only now.
    from quire_operator import cli

    return cli.main()

# SPDX-License-Identifier: Apache-2.0
"""`python -m cluster`: what the Makefile calls.

tools   find Kubernetes' programs on this machine, or download or build them; says where they are
"""

import argparse
import sys

from cluster import tools


def say(text: str) -> None:
    """Print a progress line."""
    print(f"cluster: {text}", flush=True)


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        prog="cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["tools"])
    parser.parse_args()
    try:
        say(str(tools.make(say)))
    except tools.Unavailable as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

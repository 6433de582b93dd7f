# SPDX-License-Identifier: Apache-2.0
"""The CRD's patterns in words, for messages: a regular expression tells few readers what is wrong, and none what to do.

Called by explain.py. A test holds the table to the CRD: every pattern there has an entry here.
"""

QUANTITY_RULE = "must be a number with a unit"
"""Of a size: without a unit it would be bytes."""
_NAME_RULE = "must be a-z, 0-9, '-' and '.', beginning and ending with a letter or digit"
_CIDR_RULE = "must be a range of addresses"

PATTERN_MESSAGES: dict[str, tuple[str, str]] = {
    r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$": (_NAME_RULE, "use a name such as tales-1.5"),
    r"^[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?$": (
        "must be letters, digits, '-', '_' and '.', beginning and ending with a letter or digit",
        "use a name such as Tales-1.5",
    ),
    r"^[1-9][0-9]*(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$": (QUANTITY_RULE, "write it like 4Gi or 512Mi"),
    r"^[1-9][0-9]*(\.[0-9]+)?m?$": ("must be a number of cores", 'write it like "4" or "1500m", with the quotes'),
    r"^0\.[1-9][0-9]{0,2}$": ("must be a decimal from 0.1 to 0.999", 'write it like "0.90", with the quotes'),
    r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$": (
        "must be a hub repository's id",
        "write it like organisation/name, without the hub's address",
    ),
    r"^[A-Za-z0-9][A-Za-z0-9._/-]*$": ("must be a branch, tag or commit", "take it from the repository's page"),
    r"^[-._a-zA-Z0-9]+$": ("must be a key of a Secret", "use letters, digits, '-', '_' and '.'"),
    r"^s3://[a-z0-9][a-z0-9.-]*[a-z0-9](/.*)?$": (
        "must be s3://, a bucket (two or more of a-z, 0-9, '-' and '.') and a folder",
        "write it like s3://bucket/folder",
    ),
    r"^https?://[^ ]+$": ("must be a URL", "begin it with https:// or http://"),
    r"^[a-z0-9-]+$": ("must be a region's name", "write it like eu-central-1"),
    r"^[0-9a-f]{64}$": ("must be 64 hexadecimal digits", "take the first column of sha256sum's output"),
    r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$": (
        "must be a label value: letters, digits, '-', '_' and '.'",
        "copy it from kubectl get nodes -L nvidia.com/gpu.product",
    ),
    r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$": (
        "must be an extended resource, domain/name",
        "write it like nvidia.com/gpu",
    ),
    r"^[A-Za-z0-9][-A-Za-z0-9._/:@]*$": ("must be an image's reference", "write it like name:tag or name@sha256:..."),
    r"^[A-Za-z_][A-Za-z0-9_]*$": (
        "must be a variable's name: letters, digits and '_', not beginning with a digit",
        "write it like NCCL_DEBUG",
    ),
    r"^[0-9a-fA-F.:]+/[0-9]{1,3}$": (_CIDR_RULE, "write it like 10.0.0.0/8"),
}

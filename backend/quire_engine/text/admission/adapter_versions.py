# SPDX-License-Identifier: Apache-2.0
"""Splits the requests of an adapter between its versions, by weights. Pure."""

import hashlib
from collections.abc import Container, Mapping

from quire_spec.constants import AdapterName
from quire_spec.documents.adapter_catalog import VERSION


def base_name(model: str) -> str:
    """Return a model name without the name of a version."""
    return model.partition(VERSION)[0]


def version_of(model: str) -> str:
    """Return the name of the version in a model name; empty if there is none."""
    return model.partition(VERSION)[2]


class AdapterVersions:
    """The versions of all adapters that have some."""

    def __init__(self) -> None:
        self.weights_by_name: Mapping[str, Mapping[str, int]] = {}
        """The weight of each version, by the name of the adapter."""

    def choose(self, model: str, session: str, served: Container[AdapterName]) -> str:
        """Return the name of the version that a request gets; `model` if it has no versions, or none is served.

        Requests of one session get the same version, as long as it is served. If only the weights of two versions
        change, sessions move from one to the other in one direction.
        """
        weights = {
            name: weight
            for version, weight in self.weights_by_name.get(model, {}).items()
            if weight > 0 and (name := f"{model}{VERSION}{version}") in served
        }
        digest = hashlib.blake2b(f"{model}\0{session}".encode(errors="replace"), digest_size=8).digest()
        position = int.from_bytes(digest) / 2**64 * sum(weights.values())
        for name, weight in weights.items():
            position -= weight
            if position < 0:
                return name
        return next(reversed(weights), model)

# SPDX-License-Identifier: Apache-2.0
"""Verifies the signatures of models and adapters (OpenSSF Model Signing, package model-signing).

A signature lists the digest of every file of a folder. Quire reads only some files of it. Therefore, every file that is
present must be in the list with the same digest, and files in the list can be absent.
"""

import importlib.util
import logging
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire_spec.documents.trust import Signer, TrustConfig
from quire_spec.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from model_signing.manifest import Manifest

logger = logging.getLogger(__name__)

SIGNATURE_FILE = "model.sig"
MAX_SIGNATURE_BYTES = 4 * 2**20
"""Maximum size of a signature. A file of a model needs about 150 bytes."""


@dataclass(frozen=True, slots=True)
class Signed:
    """The signature of a folder."""

    signer: str
    """Name of the signer."""
    digest: str
    """sha256:... of the digests of all signed files, as in the signature."""


class SignatureVerifier:
    """Verifies folders against the signers of a TrustConfig. Its methods block."""

    def __init__(self, trust: TrustConfig) -> None:
        """Raises ConfigError if a key is invalid, or if the package model-signing is not installed."""
        if importlib.util.find_spec("model_signing") is None:
            raise ConfigError("trust: model-signing is not installed; pip install 'quire-llm[trust]'")
        self._signers = trust.signers
        for i, signer in enumerate(trust.signers):
            if signer.publicKey is not None:
                _check_key(signer.publicKey, f"trust.signers[{i}].publicKey")

    def verify(self, folder: Path, names: Iterable[str], signature: Path, what: str) -> Signed:
        """Verify that each of the files `names` in a folder is signed, and return the signer. `what` begins messages.

        Raises:
            InvalidArgument: there is no signature, it is that of no signer, or a file differs from it.
        """
        if not signature.is_file():
            raise InvalidArgument(f"{what}: is not signed (no {SIGNATURE_FILE}); sign it, or change spec.trust")
        if (size := signature.stat().st_size) > MAX_SIGNATURE_BYTES:
            raise InvalidArgument(f"{what}: {SIGNATURE_FILE} has {size} bytes, but the limit is {MAX_SIGNATURE_BYTES}")
        signer, manifest = self._read(signature, what)
        expected = _digests(manifest)
        names = sorted(names)
        actual = _digests(_hash(manifest, folder, [folder / name for name in names], what))
        signed_files = {*map(_file_of, expected)}
        for name in names:  # an empty file has no shards, and therefore no entry in `actual`
            if name not in signed_files:
                raise InvalidArgument(f"{what}: {name} is not in the signature of {signer.name!r}; remove or sign it")
            parts = [{key: d for key, d in digests.items() if _file_of(key) == name} for digests in (actual, expected)]
            if parts[0] != parts[1]:
                raise InvalidArgument(
                    f"{what}: {name} differs from the signature of {signer.name!r}; restore the file, or sign it again"
                )
        return Signed(signer.name, _root_digest(manifest))

    def _read(self, signature: Path, what: str) -> "tuple[Signer, Manifest]":
        """Return the signer and the content of a signature. Its files are not read."""
        reasons = []
        for signer in self._signers:
            try:
                return signer, _verified_manifest(signer, signature)
            except Exception as error:  # the library and sigstore raise errors of many kinds
                reasons.append(f"{signer.name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        raise InvalidArgument(
            f"{what}: {SIGNATURE_FILE} is not a signature of {', '.join(s.name for s in self._signers)} "
            f"({'; '.join(reasons)}); sign it with one of their keys, or add the signer to spec.trust"
        )


def _verified_manifest(signer: Signer, signature: Path) -> "Manifest":
    """Verify that a signature is that of a signer, and return its list of files."""
    from model_signing import verifying
    from model_signing._signing import sign_sigstore, sign_sigstore_pb

    # Config.verify requires that all signed files are present, so only its verifier is used.
    config = verifying.Config()
    if signer.identity is not None:
        config.use_sigstore_verifier(identity=signer.identity.subject, oidc_issuer=signer.identity.issuer)
        content: Any = sign_sigstore.Signature.read(signature)
    else:
        assert signer.publicKey is not None, "a signer has a key or an identity"
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
            file.write(signer.publicKey)
            file.flush()
            config.use_elliptic_key_verifier(public_key=file.name)
        content = sign_sigstore_pb.Signature.read(signature)
    verifier: Any = config._verifier
    manifest: Manifest = verifier.verify(content)
    return manifest


def _hash(manifest: "Manifest", folder: Path, files: Sequence[Path], what: str) -> "Manifest":
    """Hash files of a folder in the way of a signature."""
    from model_signing import hashing

    arguments, config = manifest.serialization_type, hashing.Config()
    options = {"hashing_algorithm": arguments.get("hash_type")}
    if arguments.get("method") == "shards":
        config.use_shard_serialization(**options, shard_size=int(arguments["shard_size"]))
    elif arguments.get("method") == "files":
        config.use_file_serialization(**options)
    else:
        raise InvalidArgument(f"{what}: {SIGNATURE_FILE} has an unknown format; sign it with model-signing 1.1")
    # Links are followed, because the snapshots of the hub's cache consist of links.
    config.set_ignored_paths(paths=(), ignore_git_paths=False).set_allow_symlinks(True)
    return config.hash(folder, files_to_hash=files)


def _digests(manifest: "Manifest") -> dict[str, tuple[str, str]]:
    return {d.identifier: (d.digest.algorithm, d.digest.digest_hex) for d in manifest.resource_descriptors()}


def _file_of(identifier: str) -> str:
    """Return the file of an entry, which is a file or a shard FILE:START:END."""
    name, *bounds = identifier.rsplit(":", 2)
    return name if len(bounds) == 2 and all(bound.isdigit() for bound in bounds) else identifier


def _root_digest(manifest: "Manifest") -> str:
    from hashlib import sha256

    root = sha256()
    for descriptor in manifest.resource_descriptors():
        root.update(descriptor.digest.digest_value)
    return f"sha256:{root.hexdigest()}"


def _check_key(pem: str, field_path: str) -> None:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(pem.encode())
    except Exception as error:
        raise ConfigError(f"{field_path}: is not a public key in PEM format ({error}); copy the whole file") from error
    if not isinstance(key, EllipticCurvePublicKey):
        raise ConfigError(f"{field_path}: must be a key on an elliptic curve; create one with openssl ecparam")

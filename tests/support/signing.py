# SPDX-License-Identifier: Apache-2.0
"""Signs folders with model-signing, as its command does."""

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from model_signing import hashing, signing

from quire_spec.documents.trust import Signer


class Key:
    """A key pair on an elliptic curve."""

    def __init__(self, folder: Path, name: str, curve: ec.EllipticCurve | None = None) -> None:
        private = ec.generate_private_key(curve or ec.SECP256R1())
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(
            private.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        public = private.public_key()
        self.pem = public.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ).decode()
        self.signer = Signer(name=name, publicKey=self.pem)

    def sign(self, folder: Path, config: hashing.Config | None = None) -> Path:
        """Sign a folder; return the file of the signature, model.sig in it."""
        signature = folder / "model.sig"
        signature.unlink(missing_ok=True)
        config = config or hashing.Config().use_file_serialization(allow_symlinks=True)
        signing.Config().use_elliptic_key_signer(private_key=self.file).set_hashing_config(
            config.set_ignored_paths(paths=[signature], ignore_git_paths=True)
        ).sign(folder, signature)
        return signature

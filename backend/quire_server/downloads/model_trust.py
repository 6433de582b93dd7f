# SPDX-License-Identifier: Apache-2.0
"""Verifies the signatures of the base model and of the draft model before they are loaded.

Every file of the folder must be signed, except hidden ones: downloads keep their records in them.
"""

import logging
from pathlib import Path

from quire_server.downloads.signatures import SIGNATURE_FILE, SignatureVerifier
from quire_spec.documents.pod_config import PodConfig
from quire_spec.documents.pod_status import ModelSignature
from quire_spec.documents.trust import TrustPolicy
from quire_spec.errors import ConfigError, InvalidArgument

logger = logging.getLogger(__name__)


def verify_models(config: PodConfig) -> dict[str, ModelSignature]:
    """Return the signatures of the models of a pod, by `model` and `draft`. This call blocks while it reads all files.

    Raises:
        ConfigError: spec.trust requires a signature, and a model has none that is accepted.
    """
    if config.trust is None or config.trust.model is TrustPolicy.IGNORE:
        return {}
    verifier, signatures = SignatureVerifier(config.trust), {}
    drafts = config.engine.speculative_config
    folders = {"model": config.engine.model, "draft": None if drafts is None else drafts.model}
    for name, folder in folders.items():
        if folder is not None:
            try:
                signatures[name] = _verify(verifier, Path(folder), name)
            except InvalidArgument as error:
                if config.trust.model is TrustPolicy.REQUIRE:
                    raise ConfigError(str(error)) from error
                logger.warning("signature refused, policy Warn: %s", error)
                signatures[name] = ModelSignature(None, None, str(error))
    return signatures


def _verify(verifier: SignatureVerifier, folder: Path, name: str) -> ModelSignature:
    if not folder.is_dir():
        raise InvalidArgument(f"{name} {str(folder)!r}: is not a folder; with trust, give the folder of the model")
    signed = verifier.verify(folder, _files(folder), folder / SIGNATURE_FILE, f"{name} {str(folder)!r}")
    logger.info("signature verified %s signer=%s digest=%s", name, signed.signer, signed.digest)
    return ModelSignature(signed.signer, signed.digest)


def _files(folder: Path) -> list[str]:
    """Return the files that must be signed."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    visible = (path for path in paths if not any(part.startswith(".") for part in path.parts))
    return sorted(str(path) for path in visible if path != Path(SIGNATURE_FILE))

# SPDX-License-Identifier: Apache-2.0
"""Model and adapter sources on the local machine.

The module maps paths and claims to folders, and checks that this machine can read them.

It reads the file system and writes nothing. Called by serve.py, plan.py and render.py, which print the problems.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quire_operator.api.validation_errors import FieldPath, Problem
from quire_spec.documents.adapter_catalog import AdapterSource
from quire_spec.documents.sources import PvcSource, SecretRef, Source
from quire_spec.errors import ConfigError

MODEL_FILES = ("config.json",)
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class LocalSources:
    """The local folders that stand for relative paths, claims and Secrets."""

    base_dir: Path
    """Folder to which relative paths refer. It is the folder of the LLMService file."""
    volumes: Mapping[str, Path]
    """The local folder of each claim, by claim name. They come from --volume."""
    secrets_dir: Path | None = None
    """The folder that was given with --secrets-dir. It contains one folder for each Secret."""

    def resolve(self, source: Source) -> Path | None:
        """Return the local folder of a source that is a path or a pvc.

        Return None for other sources, and for claims that --volume does not list.
        """
        if source.path is not None:
            return (self.base_dir / Path(source.path).expanduser()).resolve()
        if source.pvc is not None and source.pvc.claimName in self.volumes:
            return (self.volumes[source.pvc.claimName] / source.pvc.path).resolve()
        return None

    def localize(self, source: Source) -> Source:
        """Return the source in the form that the server's catalog needs, with absolute paths.

        If --secrets-dir was not given, the Secret is removed from the source.

        The token of the hub then comes from the login of the local user (HF_TOKEN, `hf auth login`).
        """
        if source.path is not None:
            return replace(source, path=str(self.resolve(source)))
        if source.huggingFace is not None and self.secrets_dir is None:
            return replace(source, huggingFace=replace(source.huggingFace, tokenSecretRef=None))
        return source

    def localize_prefix(self, prefix: AdapterSource) -> AdapterSource:
        """Return a place of adapters in the form that the server's catalog needs; see `localize`."""
        if prefix.path is not None:
            return replace(prefix, path=str(self.resolve(prefix.source)))
        if prefix.huggingFace is not None and self.secrets_dir is None:
            return replace(prefix, huggingFace=replace(prefix.huggingFace, tokenSecretRef=None))
        return prefix

    def iter_problems(self, source: Source, source_path: FieldPath, files: Sequence[str]) -> Iterator[Problem]:
        """Yield the problems that prevent this machine from reading the source. `files` are the names of files that the
        folder of the source must contain.
        """
        yield from self._iter_secret_problems(source, source_path)
        if source.pvc is not None and source.pvc.claimName not in self.volumes:
            yield Problem(
                (*source_path, "pvc", "claimName"),
                source.pvc.claimName,
                "claims are not available on this machine",
                f"give the folder of the claim: --volume {source.pvc.claimName}=FOLDER",
            )
        if source.image is not None:
            yield Problem(
                (*source_path, "image", "reference"),
                source.image.reference,
                "image volumes exist only in a cluster",
                "give a path, or push the files to a registry with oras and use oci",
            )
        folder = self.resolve(source)
        if folder is None:
            return
        field = (*source_path, "path") if source.pvc is None else (*source_path, "pvc", "path")
        value = source.path if source.pvc is None else source.pvc.path
        if source.pvc is not None and not folder.is_relative_to(self.volumes[source.pvc.claimName].resolve()):
            yield Problem(field, value, f"{folder} is outside the volume", "copy the files into the volume")
        elif not folder.is_dir():
            yield Problem(field, value, f"{folder} is not a folder", _path_fix(source.pvc, self.base_dir))
        elif missing := [name for name in files if not (folder / name).is_file()]:
            yield Problem(
                field,
                value,
                f"{folder} does not contain {' and '.join(missing)}",
                "give the folder that contains the files",
            )

    def read_secret(self, ref: SecretRef) -> dict[str, str]:
        """Return the keys and values of a Secret.

        Raises:
            ConfigError: the folder of the Secret cannot be read.
        """
        folder = (self.secrets_dir or Path()) / ref.name
        try:
            return {path.name: path.read_text().strip() for path in folder.iterdir() if path.is_file()}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"Secret {ref.name!r}: {folder} cannot be read; create it with one file for each key"
            ) from error

    def secret_problems(self, ref: SecretRef, ref_path: FieldPath) -> Iterator[Problem]:
        """If the folder of the Secret does not exist, yield a problem."""
        field = (*ref_path, "name")
        if self.secrets_dir is None:
            yield Problem(field, ref.name, "Secrets are not available on this machine", _SECRETS_FIX.format(ref.name))
        elif not (self.secrets_dir / ref.name).is_dir():
            folder = self.secrets_dir / ref.name
            yield Problem(field, ref.name, f"{folder} is not a folder", "create it with one file for each key")

    def _iter_secret_problems(self, source: Source, source_path: FieldPath) -> Iterator[Problem]:
        # Without the Secret, the hub's token can come from the login that is stored on this machine.
        if source.secret_ref is not None and (self.secrets_dir is not None or source.huggingFace is None):
            yield from self.secret_problems(source.secret_ref, (*source_path, *source.secret_field))


_SECRETS_FIX = "give --secrets-dir DIR, where DIR/{} contains one file for each key of the Secret"


def _path_fix(pvc: PvcSource | None, base_dir: Path) -> str:
    return "correct the path in the volume" if pvc else f"correct the path; relative paths start at {base_dir}"

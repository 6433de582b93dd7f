# SPDX-License-Identifier: Apache-2.0
"""Signatures of models and adapters, made by model-signing itself."""

import json
import shutil

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_signing import hashing
from support.signing import Key

from quire_server.downloads import signatures
from quire_server.downloads.model_trust import verify_models
from quire_server.downloads.signatures import SignatureVerifier
from quire_spec.documents.pod_config import PodConfig
from quire_spec.documents.trust import Signer, SignerIdentity, TrustConfig
from quire_spec.errors import ConfigError, InvalidArgument

NAMES = ["config.json", "weights.safetensors"]
FORMATS = {
    "files": lambda: hashing.Config().use_file_serialization(),
    "blake3": lambda: hashing.Config().use_file_serialization(hashing_algorithm="blake3"),
    "shards": lambda: hashing.Config().use_shard_serialization(shard_size=1000),
}


@pytest.fixture
def key(tmp_path):
    return Key(tmp_path, "release")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    (folder / "more").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "weights.safetensors").write_bytes(bytes(range(256)) * 10)
    (folder / "README.md").write_text("read me")
    (folder / "more/vocab.txt").write_text("a b")
    return folder


def verify(key, folder, names=NAMES, signature=None):
    verifier = SignatureVerifier(TrustConfig(signers=(key.signer,)))
    return verifier.verify(folder, names, signature or folder / "model.sig", "model 'm'")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda c: c.name)
def test_a_signed_folder_names_its_signer(tmp_path, folder, form, curve):
    key = Key(tmp_path, "release", curve)
    key.sign(folder, FORMATS[form]())
    signed = verify(key, folder)
    subject = json.loads(__import__("base64").b64decode(
        json.loads((folder / "model.sig").read_text())["dsseEnvelope"]["payload"]
    ))["subject"][0]  # fmt: skip
    assert (signed.signer, signed.digest) == ("release", f"sha256:{subject['digest']['sha256']}")
    shutil.rmtree(folder / "more")
    (folder / "README.md").unlink()
    assert verify(key, folder) == signed, "only the files that are present must fit"


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_change_of_a_file_is_noticed(tmp_path_factory, form, data):
    tmp_path = tmp_path_factory.mktemp("signed")
    key = Key(tmp_path, "release")
    folder = tmp_path / "model"
    folder.mkdir()
    content = data.draw(st.binary(min_size=1, max_size=3500))
    (folder / "config.json").write_text("{}")
    (folder / "weights.safetensors").write_bytes(content)
    key.sign(folder, FORMATS[form]())
    changed = data.draw(
        st.one_of(st.binary(max_size=3500), st.integers(0, len(content) - 1).map(lambda n: content[:n]))
    )
    (folder / "weights.safetensors").write_bytes(changed)
    if changed == content:
        assert verify(key, folder).signer == "release"
    else:
        with pytest.raises(InvalidArgument, match=r"weights.safetensors (differs from|is not in) the signature"):
            verify(key, folder)


def test_what_is_refused_and_why(tmp_path, folder, key):
    with pytest.raises(
        InvalidArgument, match=r"^model 'm': is not signed \(no model.sig\); sign it, or change spec.trust"
    ):
        verify(key, folder)
    Key(tmp_path, "other").sign(folder)
    with pytest.raises(InvalidArgument, match=r"model.sig is not a signature of release \(release: .*Key mismatch"):
        verify(key, folder)
    key.sign(folder)
    (folder / "chat_template.jinja").write_text("{{ evil }}")
    with pytest.raises(InvalidArgument, match=r"chat_template.jinja is not in the signature of 'release'; remove or"):
        verify(key, folder, [*NAMES, "chat_template.jinja"])


def test_a_signature_of_another_folder(tmp_path, folder, key):
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "config.json").write_text('{"r": 8}')
    signature = key.sign(other)
    with pytest.raises(InvalidArgument, match=r"config.json differs from the signature of 'release'; restore"):
        verify(key, folder, signature=signature)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: "[]",
        lambda text: "x" * 100,
        lambda text: text[: len(text) // 2],
        lambda text: json.dumps({**json.loads(text), "dsseEnvelope": {}}),
        lambda text: text.replace('"sig":', '"sig": "AAAA", "sog":'),
        lambda text: "[" * 50_000,
        lambda text: " " * (signatures.MAX_SIGNATURE_BYTES + 1),
    ],
)
def test_a_broken_signature_is_one_clear_error(folder, key, change):
    signature = key.sign(folder)
    signature.write_text(change(signature.read_text()))
    with pytest.raises(InvalidArgument, match=r"^model 'm': model.sig (is not a signature of release|has \d+ bytes)"):
        verify(key, folder)


def test_a_tampered_list_of_files(folder, key):
    import base64

    signature = key.sign(folder)
    document = json.loads(signature.read_text())
    envelope = document["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"]).replace(b"config.json", b"konfig.json")
    envelope["payload"] = base64.b64encode(payload).decode()
    signature.write_text(json.dumps(document))
    with pytest.raises(InvalidArgument, match="InvalidSignature"):
        verify(key, folder)


def test_one_of_several_signers_is_enough_and_identities_need_a_certificate(tmp_path, folder, key):
    identity = SignerIdentity(subject="ci@example.com", issuer="https://accounts.example.com")
    keyless = Signer(name="ci", identity=identity)
    key.sign(folder)
    verifier = SignatureVerifier(TrustConfig(signers=(Key(tmp_path, "old").signer, key.signer)))
    assert verifier.verify(folder, NAMES, folder / "model.sig", "m").signer == "release"
    with pytest.raises(InvalidArgument, match="is not a signature of ci"):
        SignatureVerifier(TrustConfig(signers=(keyless,))).verify(folder, NAMES, folder / "model.sig", "m")


def test_wrong_keys_are_errors_of_the_configuration(tmp_path):
    key = rsa.generate_private_key(65537, 2048).public_key()
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode()
    for text, problem in ((pem, "must be a key on an elliptic curve"), ("-----BEGIN PUBLIC KEY-----\n", "PEM format")):
        with pytest.raises(ConfigError, match=rf"^trust.signers\[0\].publicKey: .*{problem}"):
            SignatureVerifier(TrustConfig(signers=(Signer(name="x", publicKey=text),)))


def test_the_missing_package_is_named_with_its_extra(key, monkeypatch):
    monkeypatch.setattr(signatures.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'quire-llm\[trust\]'"):
        SignatureVerifier(TrustConfig(signers=(key.signer,)))


def pod(folder, key, policy, **engine):
    trust = {"signers": [{"name": "release", "publicKey": key.pem}], "model": policy}
    document = {"servedName": "m", "engine": {"model": str(folder), **engine}, "adapters": "/none", "trust": trust}
    return PodConfig.from_json(document | {"openai": {"port": 8004}})


def test_models_are_verified_as_the_policy_says(tmp_path, folder, key):
    with pytest.raises(ConfigError, match=r"^model '.*/model': is not signed"):
        verify_models(pod(folder, key, "Require"))
    assert verify_models(pod(folder, key, "Ignore")) == {}
    refused = verify_models(pod(folder, key, "Warn"))["model"]
    assert refused.signer is None and "is not signed" in refused.error
    key.sign(folder)
    (folder / ".download").write_text("a record of a download")
    assert verify_models(pod(folder, key, "Require"))["model"].signer == "release"
    (folder / "added.py").write_text("")
    with pytest.raises(ConfigError, match=r"added.py is not in the signature"):
        verify_models(pod(folder, key, "Require"))
    with pytest.raises(ConfigError, match="is not a folder; with trust, give the folder of the model"):
        verify_models(pod("org/model", key, "Require"))


def test_snapshots_of_the_hub_are_links(tmp_path, folder, key):
    key.sign(folder)
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in (*NAMES, "model.sig"):
        (snapshot / name).symlink_to(folder / name)
    assert verify_models(pod(snapshot, key, "Require"))["model"].signer == "release"

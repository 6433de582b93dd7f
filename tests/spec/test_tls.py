# SPDX-License-Identifier: Apache-2.0
"""What is said of TLS and proxies that fail, from what CPython's OpenSSL and obstore's rustls say of it.

tests/server/test_tls.py has the real servers; here is what does not come out of those by itself.
"""

import pytest

from quire_spec.s3 import unsigned
from quire_spec.secret import said

OBSTORE = """Generic S3 error: Error performing GET https://h/b in 33.57ms - HTTP error: error sending request

Debug source:
Generic {
    source: RetryError(
        RetryErrorImpl {
            inner: Http(
                HttpError {
                    kind: Connect,
                    source: reqwest::Error {
                        source: hyper_util::client::legacy::Error(
                            %s,
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert certificate required (_ssl.c:2580)", "it wants a cert"),
        (
            "Connect, Custom {\n kind: InvalidData, error: AlertReceived(\n CertificateRequired",
            "it wants a certificate",
        ),
        (
            "certificate verify failed: self-signed certificate in certificate chain (_ssl.c:1006)",
            "signed by no authority",
        ),
        ("InvalidCertificate(\n    BadSignature,\n)", "signed by no authority"),
        (
            "certificate verify failed: Hostname mismatch, certificate is not valid for 'h'. (_ssl.c:1006)",
            "another name",
        ),
        ("certificate verify failed: certificate is not yet valid (_ssl.c:1006)", "not valid yet"),
        ("InvalidCertificate(\n    NotValidYetContext {", "not valid yet"),
        ("InvalidCertificate(\n    Other(\n        OtherError(\n            CaUsedAsEndEntity,", "CA:TRUE"),
        ("_ssl.c:989: The handshake operation timed out", "nobody answers there by TLS"),
        ("[Errno 21] Is a directory", "the file that SSL_CERT_FILE names is not there"),
        ("[Errno 2] No such file or directory: '/models/a'", "[Errno 2] No such file or directory: '/models/a'"),
    ],
)
def test_an_error_of_tls(text, words):
    found = said(OSError(text))
    assert words in found and "\n" not in found


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("InvalidCertificate(\n    UnsupportedCertVersion,", "TLS fails: UnsupportedCertVersion"),
        ("AlertReceived(\n    InternalError,", "TLS fails: InternalError"),
        ("InvalidCertificate(\n    Other(\n    OtherError(\n    PathLenConstraint,", "TLS fails: PathLenConstraint"),
        ('"dns error", Custom {\n error: "failed to lookup: Name unknown",', "failed to lookup: Name unknown"),
        ('Custom {\n error: "peer closed connection: https://docs.rs/rustls",', "peer closed connection"),
        ("Connect,\n    TimedOut", "no answer in time"),
        ("Connect,\n    ProxyAuthRequired", "the proxy answers 407"),
        ("Connect,\n    TunnelUnsuccessful", "the proxy does not let us there"),
        ("SomethingElse", "HTTP error: error sending request"),
    ],
)
def test_no_answer_of_a_platform(cause, words):
    text = str(unsigned("s3://b/config.json", Exception(OBSTORE % cause)))
    assert words in text and text.startswith("s3://b/config.json: ") and "\n" not in text

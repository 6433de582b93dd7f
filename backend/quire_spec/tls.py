# SPDX-License-Identifier: Apache-2.0
"""Why no connection came about, by TLS or by a proxy: what libraries say of it, as words of what to do. Pure.

Sources are read by aiohttp and httpx, which say what OpenSSL does; a platform is asked for an identity by obstore,
whose rustls says it in Rust's debug output only. All of them trust the authorities of the file that SSL_CERT_FILE
names; secret.py calls this.
"""

import re

_FILE = "the file that SSL_CERT_FILE names"

_CAUSES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (
            # The number alone: what a library says when it opens that file.
            r"^\[Errno (2|21)\] [A-Z][a-z ]+$|NO_CERTIFICATE_OR_CRL_FOUND|\[X509\] PEM lib|No CA certificates were",
            f"{_FILE} is not there, or holds no certificates in PEM; correct the variable or the file",
        ),
        (
            # The last two: another authority of the same name, such as one that was made anew.
            r"unable to get (local )?issuer certificate|unable to verify the first|self.signed certificate|"
            r"UnknownIssuer|certificate signature failure|InvalidCertificate\(\s*BadSignature",
            f"its certificate is signed by no authority that is trusted here; put that authority's into {_FILE}",
        ),
        (
            r"CaUsedAsEndEntity",
            "its certificate is an authority's own (CA:TRUE), which a server may not show; give it one that is "
            "signed by that authority",
        ),
        (
            r"certificate is not valid for|[Hh]ostname mismatch|IP address mismatch|NotValidForName",
            "its certificate is for another name; use a host that it names, or have this one added to its alternative "
            "names",
        ),
        (r"certificate has expired|InvalidCertificate\(\s*Expired", "its certificate has expired; have it renewed"),
        (
            r"certificate is not yet valid|InvalidCertificate\(\s*NotValidYet",
            "its certificate is not valid yet; set the clocks of both machines right",
        ),
        (
            r"WRONG_VERSION_NUMBER|InvalidContentType",
            "it does not speak TLS on that port; correct the port, or https to http",
        ),
        (
            r"CERTIFICATE_REQUIRED|CertificateRequired",
            "it wants a certificate of its clients, and Quire has none to show; let it in without, by a token or a key",
        ),
        (
            r"HANDSHAKE_FAILURE|HandshakeFailure",
            "it refuses TLS with us: it wants a certificate of its clients, which Quire has none of, or other ciphers",
        ),
        (
            r"ALERT_PROTOCOL_VERSION|UNSUPPORTED_PROTOCOL|ProtocolVersion|PeerIncompatible",
            "it speaks no TLS of 1.2 or later; have it speak that",
        ),
        (
            r"Proxy Authentication Required|ProxyAuthRequired",
            "the proxy answers 407: it wants a user and a password, or others; correct HTTPS_PROXY",
        ),
        (r"TunnelUnsuccessful|TunnelUnexpectedEof", "the proxy does not let us there; correct HTTPS_PROXY or NO_PROXY"),
        (r"ssl:\w+ \[None\]", "it ends the connection before TLS is agreed on"),
        (r"handshake operation timed out", "its port is open, and nobody answers there by TLS"),
    )
)


def hint(status: int, url: str) -> str:
    """What to add to the status of a bad answer: ports that speak TLS answer 400 to whoever does not."""
    return "; if that port speaks TLS, correct http to https" if status == 400 and url.startswith("http:") else ""


def cause(text: str) -> str | None:
    """What to say of an error instead of a library's own `text`; None where that is no failure of TLS or a proxy."""
    return next((words for pattern, words in _CAUSES if pattern.search(text)), None)

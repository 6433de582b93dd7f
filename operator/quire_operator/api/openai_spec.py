# SPDX-License-Identifier: Apache-2.0
"""spec.openai of an LLMService."""

from dataclasses import dataclass
from typing import ClassVar

from quire_operator.api.quantity import QUANTITY
from quire_spec.documents.field_schema import OBJECT_NAME, Rule, schema_field
from quire_spec.documents.pod_config import OpenAIOptions
from quire_spec.documents.sources import SecretRef
from quire_spec.model import capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigMapKeyRef:
    """spec.openai.chatTemplate.configMapKeyRef"""

    name: str = schema_field(**OBJECT_NAME)
    """Name of a ConfigMap in the same namespace."""
    key: str = schema_field("chat_template.jinja", min_length=1, max_length=253, pattern="^[-._a-zA-Z0-9]+$")
    """Key in the ConfigMap that contains the template. Default chat_template.jinja."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplateSpec:
    """spec.openai.chatTemplate. Exactly one of the fields is set."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.text) != has(self.configMapKeyRef)",
            "chatTemplate must have exactly one of text and configMapKeyRef; keep the one that contains the template.",
        ),
    )

    text: str | None = schema_field(None, min_length=1, max_length=65536)
    """The template itself."""
    configMapKeyRef: ConfigMapKeyRef | None = schema_field(None)
    """Entry of a ConfigMap with the template. Pods read it when they start; if it is missing, they do not start. To
    replace a template, use a ConfigMap with another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAILimitsSpec:
    """spec.openai.limits"""

    maxBodySize: str | None = schema_field(None, **QUANTITY)
    """Largest body of a request, such as 16Mi. A larger body gets status 413. Default 8Mi, enough for a prompt of a
    million token IDs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAISpec(OpenAIOptions):
    """spec.openai"""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.keys) || size(self.keys) == 0 || has(self.apiKeysSecretRef)",
            "keys must be empty without apiKeysSecretRef, because it names keys of that Secret; add the reference.",
        ),
    )

    enabled: bool = schema_field(True)
    """Serve the OpenAI API. Default true. With false, its processes do not run, which frees about 128 MiB in each pod.
    """
    port: int | None = schema_field(None, minimum=1024, maximum=65535)
    """Port of the container and of the Service. Default: 8004, or the next number that runtime.ports does not use."""
    apiKeysSecretRef: SecretRef | None = schema_field(None, without=("key",))
    """Secret whose entries are API keys. Metrics show the names of the entries. Pods read a changed Secret within two
    minutes, without a restart. If the Secret is missing, pods do not start. Default: no key is needed."""
    tlsSecretRef: SecretRef | None = schema_field(None, without=("key",))
    """Secret of type kubernetes.io/tls with the certificate and key of the API. Pods read a renewed certificate without
    a restart. Default: HTTP without TLS."""
    toolCallParser: str = schema_field(
        "auto",
        enum=("auto", "none", *capabilities.TOOL_CALL_PARSERS),
    )
    """Format of tool calls in the outputs of chats, with vLLM's names. With auto, the pods detect it from the chat
    template and the tokens of the checkpoint, and status.toolCallParser shows it. With none, calls stay in the text.
    Default auto."""
    reasoningParser: str = schema_field("auto", enum=("auto", "none", *capabilities.REASONING_PARSERS))
    """Format of the reasoning before an answer, with vLLM's names. With auto, the pods detect it from the checkpoint,
    and status.reasoningParser shows it. With none, the reasoning stays in the text. Default auto."""
    chatTemplate: ChatTemplateSpec | None = schema_field(None)
    """Chat template (Jinja) that replaces the checkpoint's template: set exactly one field. An adapter with its own
    template uses that template. Default: the template of the checkpoint."""
    limits: OpenAILimitsSpec = schema_field(factory=OpenAILimitsSpec)
    """Limits of a request."""

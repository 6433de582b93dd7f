# SPDX-License-Identifier: Apache-2.0
"""What the supervisor reports: the ready banner, its own Prometheus metrics, and a part of the status. Pure
functions."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from quire_server.supervisor.settings import SupervisorSettings
from quire_spec.documents.pod_status import AdapterState, OtherModelState, PodStatus
from quire_spec.net.addresses import format_for_url
from quire_spec.protocol.kv_wire import RowLayout
from quire_spec.protocol.results import KVPeerStatus

_MAX_NAMES = 5


def summarize_names(names: Sequence[str]) -> str:
    """Join names into one text. The first five names are written out, and the others are only counted."""
    summary = ", ".join(names[:_MAX_NAMES])
    return f"{summary} and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else summary


def ready_banner(settings: SupervisorSettings, status: PodStatus, startup_s: float) -> str:
    """Return the text that is printed once when the pod is ready."""
    config, host = settings.config, format_for_url(settings.host)
    failed = [(a.name, a.error) for a in status.adapters if a.state is AdapterState.FAILED]
    failed += [(m.name, m.error) for m in status.other_models if m.state is OtherModelState.FAILED]
    others = [m.name for m in status.other_models if m.state is OtherModelState.READY]
    parameter_only = [a.name for a in status.adapters if a.state is AdapterState.READY and a.model is None]
    openai = []
    if config.openai is not None:
        scheme = "http" if config.openai.sslCertfile is None else "https"
        url = f"{scheme}://{host}:{config.openai.port}"
        openai = [f"  OpenAI    {url}/v1"]
        if config.openai.live:
            openai.append(f"  page      {url}/live")
        model = (*config.openai.servedModelNames, status.served_name)[0]
        key = ' -H "Authorization: Bearer $QUIRE_API_KEY"' if config.openai.apiKeysDir else ""
        openai.append(f"  try       curl {url}/v1/completions -H 'Content-Type: application/json'{key} \\")
        openai.append(f"""              -d '{{"model": "{model}", "prompt": "Once upon a time", "max_tokens": 40}}'""")
    server = {
        "http": f"  HTTP      http://{host}:{config.ports.http}/v2/models/{status.served_name}/generate",
        "grpc": f"  gRPC      {host}:{config.ports.grpc}",
    }
    lines = [
        f"Quire {status.version} is ready after {startup_s:.1f} s",
        *(line for protocol, line in server.items() if protocol in config.server.expose),
        *openai,
        f"  metrics   http://{host}:{config.ports.health}/metrics",
        f"  health    http://{host}:{config.ports.health}/health/ready",
        f"  status    http://{host}:{config.ports.health}/status",
        f"  models    {', '.join(status.models)}",
    ]
    if parameter_only:
        lines.append(f"  adapters  {', '.join(parameter_only)} (lora_name on {status.served_name})")
    if others:
        lines.append(f"  others    {', '.join(others)}")
    lines += [f"  failed    {name}: {error}" for name, error in failed]
    return "\n".join(lines)


def supervisor_metrics(status: PodStatus) -> str:
    """Return the supervisor's own metrics in Prometheus's text format."""
    states = Counter(a.state for a in status.adapters)
    restarts = {f'process="{name}"': p.restarts for name, p in status.processes.items()}
    families = [
        _family("quire_ready", "gauge", "1 when this pod is ready.", {"": int(status.ready)}),
        _family("quire_process_restarts_total", "counter", "Restarts of a process of this pod.", restarts),
        _family(
            "quire_adapters", "gauge", "Adapters by state.", {f'state="{s.value}"': states[s] for s in AdapterState}
        ),
        _family(
            "quire_adapters_without_effect",
            "gauge",
            "Adapters that do not change the outputs of the effect probe.",
            {"": sum(a.effect is not None and a.warning.startswith("NoEffect") for a in status.adapters)},
        ),
    ]
    return "".join(families)


def kv_peer_metrics(status: KVPeerStatus) -> str:
    """Return the metrics of the process that serves KV blocks, in Prometheus's text format. They start at zero when it
    restarts."""
    refused = {f'reason="{reason}"': number for reason, number in sorted(status.refused.items())}
    numbers = (
        ("connections", "gauge", "Connections of other pods.", status.num_connections),
        ("sent_blocks_total", "counter", "KV blocks sent to other pods.", status.num_sent_blocks),
        ("sent_bytes_total", "counter", "Bytes of KV blocks sent to other pods.", status.num_sent_bytes),
    )
    families = [_family(f"quire_kv_transfer_{name}", kind, text, {"": value}) for name, kind, text, value in numbers]
    text = "Connections of other pods that were refused or closed because of an error, by reason."
    families.append(_family("quire_kv_transfer_refused_total", "counter", text, refused))
    return "".join(families)


def layout_differences(status: KVPeerStatus) -> list[str]:
    """Return the fields of RowLayout because of which connections of other pods were refused."""
    return [name for name in RowLayout.__struct_fields__ if status.refused.get(name)]


def concat_pages(*pages: str) -> str:
    """Concatenate pages of metrics. If a page does not end with a newline, add one."""
    return "".join(page if page.endswith("\n") else f"{page}\n" for page in pages if page)


def _family(name: str, kind: str, text: str, samples: Mapping[str, float]) -> str:
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *_samples(name, samples.items())]
    return "\n".join(lines) + "\n"


def _samples(name: str, samples: Iterable[tuple[str, float]]) -> list[str]:
    return [f"{name}{{{labels}}} {value:g}" if labels else f"{name} {value:g}" for labels, value in samples]

# SPDX-License-Identifier: Apache-2.0
"""Checks of the pinned routers in front of two servers: completions, chats, streams and adapters go through, equal
beginnings reach one server, unknown fields are ignored, vllm-router's kv_aware policy credits the blocks that the
events announce, and its mode for prefill and decode lets one server read the KV blocks of the other one."""

import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import yaml
from support.quire_serve import EXAMPLES, QuireServeProcess, example_document
from support.routers import Router, two_pods

STORY = "Once upon a time there was a small mouse who lived in a big house with a garden and a dog and three cows. "
KINDS = ("vllm-router:cache_aware", "vllm-router:kv_aware", "sglang-router:cache_aware", "smg:cache_aware")


def post(url: str, body: dict) -> tuple[int, str]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.status, response.read().decode()


def check(router: Router, kind: str, number: int) -> None:
    prompt = {"max_tokens": 4, "prompt": f"Chapter {number}. {STORY * 3}"}
    messages = [{"role": "user", "content": "Tell me a story."}]
    for model in ("tales", "pirate"):
        cached = []
        for _ in range(6):
            status, text = post(f"{router.url}/v1/completions", {"model": model, **prompt})
            assert status == 200, text
            cached.append(json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"])
        # All equal prompts after the first one find their beginning.
        assert cached[0] == 0 or model != "tales", cached
        assert min(cached[1:]) >= 64, (kind, model, cached)
        status, text = post(
            f"{router.url}/v1/chat/completions", {"model": model, "max_tokens": 4, "messages": messages}
        )
        assert status == 200 and json.loads(text)["choices"][0]["message"]["content"], text
    status, text = post(f"{router.url}/v1/completions", {"model": "tales", "stream": True, **prompt})
    assert status == 200 and text.rstrip().endswith("[DONE]"), text
    # The router and Quire ignore fields that they do not know; the router adds fields of its own.
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}, "x": 1}
    unknown = {"vendor_field": 1, "stream_options": {"include_usage": True, "vendor": 2}, "stream": True}
    chat = {"model": "pirate", "max_tokens": 4, "messages": messages, "tools": [tool], "tool_choice": "none"}
    for path, body in (("completions", {"model": "tales", **prompt}), ("chat/completions", chat)):
        status, text = post(f"{router.url}/v1/{path}", body | unknown)
        assert status == 200 and text.rstrip().endswith("[DONE]") and '"usage"' in text, (kind, path, text)
    if kind.endswith("kv_aware"):
        hits = router.counter(r'vllm_router_kv_placement_lookups_total\{.*result="hit"')
        assert hits >= 5, f"the router credits no prefix: {hits} hits"


def check_prefill(router: Router, decode: QuireServeProcess) -> None:
    """The first pod computes the prompt, and the second one reads its blocks and generates."""
    for number, name in enumerate(("Anna", "Ben"), 1):
        prompt = " ".join(f"On day {day}, {name} went to the forest." for day in range(30))
        body = {"model": "tales", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        status, text = post(f"{router.url}/v1/completions", body)
        assert status == 200, text
        # The router takes the cached tokens in the usage from the prefill pod.
        (hits,) = re.findall(r"^vllm:external_prefix_cache_hits_total\{[^}]*\} (\S+)$", decode.metrics(), re.MULTILINE)
        assert float(hits) >= 300 * number, f"{name}: {hits} tokens of the prefill pod were used"
        _, alone = post(f"http://127.0.0.1:{decode.ports['openai']}/v1/completions", body)
        assert json.loads(text)["choices"][0]["text"] == json.loads(alone)["choices"][0]["text"]


def check_example(binaries: Path) -> None:
    """The pinned vllm-router has the options of examples/routers/vllm-router.yaml."""
    manifests = yaml.safe_load_all((EXAMPLES / "routers/vllm-router.yaml").read_text())
    (deployment,) = (manifest for manifest in manifests if manifest["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    options = {argument.partition("=")[0] for argument in container["args"] if argument.startswith("--")}
    usage = subprocess.run([binaries / "vllm-router", "--help"], capture_output=True, text=True, check=True).stdout
    assert options and options <= {*re.findall(r"--[a-z-]+", usage)}, options


def main(binaries: Path) -> None:
    """Run the checks. `binaries` is the folder of the routers' programs."""
    check_example(binaries)
    document = example_document()
    document["spec"]["engine"] |= {"kvCacheOffloading": {"memory": "64Mi"}}
    with (
        tempfile.TemporaryDirectory(prefix="quire-routers-") as temporary,
        two_pods(document, Path(temporary), shares_kv=True) as pods,
    ):
        for number, kind in enumerate(KINDS):
            with Router(binaries, kind, pods, "tales", Path(temporary, "router.log")) as router:
                check(router, kind, number)
            print(f"{kind}: ok", flush=True)
        with Router(binaries, "vllm-router:prefill", pods, "tales", Path(temporary, "router.log")) as router:
            check_prefill(router, pods[1])
        print("vllm-router, prefill and decode: ok", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

# SPDX-License-Identifier: Apache-2.0
"""Conversion of requests to GenerateRequest and of OutputDelta to tensors, with vllm_backend's semantics."""

import base64
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_server.frontend.tensors import (
    MAX_ERROR_CHARS,
    MAX_PROMPT_BYTES,
    error_response,
    initial_outputs,
    merge_by_output,
    parse_request,
    to_output_tensors,
)
from quire_server.model_server.model_interface import OUTPUTS
from quire_spec.engine.pooling_params import PoolingParams
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import Code, InvalidArgument, QuireError, Unavailable
from quire_spec.protocol.framing import FrameDecoder, encode_frame
from quire_spec.protocol.kv_transfer_params import KVTransferParams
from quire_spec.protocol.messages import OutputDelta, TokenLogprob, merge_deltas

RETURNS = (
    "finish_reason",
    "cumulative_logprob",
    "logprobs",
    "num_input_tokens",
    "num_output_tokens",
    "output_ids",
    "prompt_logprobs",
)


def strings(*texts):
    return np.array([t if isinstance(t, bytes) else t.encode() for t in texts], np.object_)


def flag(value):
    return np.array([value])


def parse(model="tales", parameters="{}", **inputs):
    """Call parse_request; `text_input` is "Hello" by default, None removes a tensor."""
    if "text_input" not in inputs and "input_ids" not in inputs:
        inputs["text_input"] = strings("Hello")
    present = {name: array for name, array in inputs.items() if array is not None}
    return parse_request(7, model, "tales", present, parameters)


def assert_rejected(*words, **kwargs):
    with pytest.raises(InvalidArgument) as caught:
        parse(**kwargs)
    assert all(word in str(caught.value) for word in words), caught.value


class TestEmbedding:
    @pytest.mark.parametrize(
        ("values", "prompt", "token_ids", "dimensions"),
        [
            ({"input": "a"}, "a", None, None),
            ({"input": [5, 6]}, None, [5, 6], None),
            ({"input": "a", "pooling_params": {"dimensions": [8]}, "model": "m"}, "a", None, 8),
            ({"input": "a", "dimensions": 8}, "a", None, 8),
        ],
    )
    def test_the_json_of_vllm_backend(self, values, prompt, token_ids, dimensions):
        # NVIDIA's frontend also sends text_input, which has no effect.
        request, options = parse(
            embedding_request=strings(json.dumps(values)), text_input=strings("other"), stream=flag(True)
        )
        assert (request.prompt, request.prompt_token_ids) == (prompt, token_ids)
        assert request.pooling == PoolingParams(dimensions=dimensions) and not request.stream
        vector = np.array([0.5, -2], "<f4")
        delta = OutputDelta(7, finish_reason="stop", num_input_tokens=2, pooled=vector.tobytes())
        tensors = to_output_tensors([delta], options, initial_outputs(7, options))
        assert {name: array.tolist() for name, array in tensors.items()} == {"text_output": [b"[0.5, -2.0]"]}

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("[]", ["expected a JSON object"]),
            ("{", ["not JSON"]),
            ("{}", ["input: must be a text or a list of token ids, got None"]),
            ('{"input": []}', ["input: must be"]),
            ('{"input": ["a", "b"]}', ["one request for each text"]),
            ('{"input": [1, true]}', ["input: must be"]),
            ('{"input": "\\ud800"}', ["input: must not contain a lone surrogate"]),
            ('{"input": "a", "dimensions": 0}', ["dimensions: must be a positive integer, got 0"]),
            ('{"input": "a", "dimensions": "8"}', ["dimensions: must be"]),
            ('{"input": "a", "pooling_params": {"dimensions": [8, 9]}}', ["dimensions: must be"]),
            ('{"input": "a", "pooling_params": 5}', ["pooling_params: must be an object, got 5"]),
        ],
    )
    def test_a_wrong_value_is_named(self, text, words):
        assert_rejected("embedding_request", *words, embedding_request=strings(text))


class TestImage:
    def test_files_in_base64(self):
        files = [b"first", b"second"]
        request, _ = parse(image=strings(*(base64.b64encode(file).decode() for file in files)))
        assert request.images == files and request.prompt == "Hello"
        assert parse()[0].images == []

    @pytest.mark.parametrize("value", ["a", "Zg==?", "data:image/png;base64,Zg=="])
    def test_a_wrong_value_is_named(self, value):
        assert_rejected("image[1]: is not valid base64", image=strings("Zg==", value))

    def test_numbers_are_rejected(self):
        assert_rejected("image[0]: must be a string in base64", image=np.array([1], np.int64))


class TestPrompt:
    def test_defaults(self):
        request, options = parse()
        assert (request.id, request.model, request.prompt, request.prompt_token_ids) == (7, "tales", "Hello", None)
        assert (request.params, request.stream, request.cache_salt) == (SamplingParams(), False, None)
        assert options.prompt_prefix == "Hello"
        assert not any(getattr(options, name) for name in RETURNS)

    def test_token_ids_instead_of_text(self):
        request, options = parse(input_ids=np.array([1, 2, 2**40]))
        assert (request.prompt, request.prompt_token_ids) == (None, [1, 2, 2**40])
        assert (options.prompt_prefix, options.output_ids) == ("", True)
        assert not parse(input_ids=np.array([1]), return_output_ids=flag(False))[1].output_ids

    @pytest.mark.parametrize(
        ("inputs", "words"),
        [
            ({"text_input": strings("x"), "input_ids": np.array([1])}, "exactly one is required, got both"),
            ({"text_input": None}, "text_input, input_ids: exactly one is required, got neither"),
            *(
                ({"text_input": strings(text)}, "text_input: invalid UTF-8")
                for text in (b"\xff", b"ok \xc3", b"\xed\xa0\x80")
            ),
            *(
                ({"text_input": array}, "text_input: must have shape [1], got")
                for array in (strings(), strings("a", "b"), np.array([["a", "b"]], np.object_))
            ),
            ({"text_input": np.array([1.5])}, "text_input: must be a string, got float64"),
            ({"text_input": strings(b"x" * (MAX_PROMPT_BYTES + 1))}, "must have at most 16777216 bytes, got 16777217"),
            *(
                ({"input_ids": array}, "input_ids: must contain integers and have one dimension, got")
                for array in (np.array([[1, 2]]), np.array(3), np.array([1.0]), np.array([True]))
            ),
            ({"input_ids": np.array([3, -5])}, "input_ids: token ids must not be negative, got -5 at position 1"),
            ({"input_ids": np.array([], np.int64)}, "input_ids: empty"),
            ({"input_ids": np.ones(2**21 + 1, np.int64)}, "input_ids: too long"),
        ],
    )
    def test_rejects_invalid_prompts(self, inputs, words):
        assert_rejected(words, **inputs)


class TestParameters:
    @pytest.mark.parametrize(
        ("parameters", "tensor", "params"),
        [
            ('{"max_tokens": 5, "temperature": "0.5"}', "{}", {"max_tokens": 5, "temperature": 0.5}),
            ("{}", '{"top_p": "0.95", "max_tokens": "100"}', {"top_p": 0.95, "max_tokens": 100}),
            ('{"max_tokens": 5, "seed": 3}', '{"max_tokens": 9}', {"max_tokens": 9, "seed": 3}),
            ("{}", '{"max_tokens": null, "lora_name": null}', {}),
            (json.dumps({"stop": '["x", "y"]'}), "{}", {"stop": ("x", "y")}),
        ],
        ids=[
            "request",
            "tensor of vllm_backend clients",
            "tensor takes precedence",
            "null is the default",
            "JSON text",
        ],
    )
    def test_sources(self, parameters, tensor, params):
        assert parse(parameters=parameters, sampling_parameters=strings(tensor))[0].params == SamplingParams(**params)

    def test_fields_of_the_server_are_not_parameters(self):
        own = {"id": "42", "timeout": 5, "sequence_id": 7, "sequence_start": True, "sequence_end": True}
        assert parse(parameters=json.dumps(own | {"binary_data_output": True, "max_tokens": 2}))[
            0
        ].params == SamplingParams(max_tokens=2)
        assert_rejected("unknown sampling parameter 'id'", sampling_parameters=strings('{"id": 1}'))

    @pytest.mark.parametrize(
        ("parameters", "words"),
        [
            ({"best_off": 2}, ("unknown sampling parameter 'best_off'", "max_tokens")),
            ({"temperature": -1}, ("'temperature': must be from 0 to 100, got -1",)),
            ({"stop": '["\\ud800"]'}, ("'stop'", "lone surrogate")),
            ({"stop": "[" * 100_000}, ("'stop'",)),
            (
                {"max_new_tokens": 5},
                ("unknown sampling parameter 'max_new_tokens'; did you mean max_tokens? Known parameters are",),
            ),
            ({"lora_nam": "sql"}, ("did you mean lora_name? Known parameters are",)),
            ({"return_finish_reasons": True}, ("did you mean return_finish_reason? Known parameters are",)),
            ({"lora_name": 5}, ("lora_name: must be a string that is not empty, got 5",)),
            ({"lora_name": ""}, ("lora_name: must be a string that is not empty, got ''",)),
            ({"lora_name": "\ud800"}, ("lora_name", "lone surrogate")),
            ({"cache_salt": True}, ("cache_salt",)),
            ({"priority": "urgent"}, ("priority: must be an integer, got 'urgent'",)),
            ({"priority": 1.5}, ("priority: must be an integer, got 1.5",)),
            ({"priority": True}, ("priority: must be an integer, got True",)),
        ],
    )
    def test_error_names_the_parameter(self, parameters, words):
        assert_rejected(*words, parameters=json.dumps(parameters))
        assert_rejected(*words, sampling_parameters=strings(json.dumps(parameters)))

    @pytest.mark.parametrize("text", ["", "{", "[1]", "5", "[" * 100_000, b"\xff"])
    def test_tensor_that_is_not_an_object(self, text):
        assert_rejected("sampling_parameters: ", sampling_parameters=strings(text))

    def test_two_sets_of_parameters(self):
        assert_rejected("sampling_parameters: must have shape [1]", "got [2]", sampling_parameters=strings("{}", "{}"))

    def test_salt(self):
        assert parse(parameters='{"cache_salt": "tenant"}')[0].cache_salt == "tenant"

    @pytest.mark.parametrize(("value", "priority"), [("-3", -3), ('"7"', 7), ("null", 0)])
    def test_priority(self, value, priority):
        request, _ = parse(parameters=f'{{"priority": {value}}}')
        assert (request.priority, request.params) == (priority, SamplingParams())


class TestModel:
    @pytest.mark.parametrize("source", ["parameters", "tensor"])
    def test_lora_name_from_parameters_and_tensor(self, source):
        text = '{"lora_name": "sql"}'
        request, _ = parse(parameters=text) if source == "parameters" else parse(sampling_parameters=strings(text))
        assert (request.model, request.params) == ("sql", SamplingParams())

    def test_model_of_an_adapter(self):
        assert parse(model="sql")[0].model == "sql"
        assert parse(model="sql", parameters='{"lora_name": "sql"}')[0].model == "sql"

    def test_lora_name_for_an_adapters_model(self):
        words = ("lora_name: got 'pirate'", "model 'sql' is itself an adapter", "'tales'")
        assert_rejected(*words, model="sql", parameters='{"lora_name": "pirate"}')


class TestFlags:
    def test_stream_and_prompt(self):
        assert parse(stream=flag(True))[1].prompt_prefix == ""
        assert parse(stream=flag(True), exclude_input_in_output=flag(True))[0].stream
        assert parse(exclude_input_in_output=flag(True))[1].prompt_prefix == ""
        assert parse(exclude_input_in_output=flag(False))[1].prompt_prefix == "Hello"
        assert_rejected("exclude_input_in_output", "stream", stream=flag(True), exclude_input_in_output=flag(False))
        assert_rejected(
            "exclude_input_in_output",
            "input_ids",
            text_input=None,
            input_ids=np.array([1]),
            exclude_input_in_output=flag(False),
        )

    @pytest.mark.parametrize("name", ["stream", "exclude_input_in_output", *(f"return_{r}" for r in RETURNS)])
    @pytest.mark.parametrize("array", [np.array([True, False]), np.array([], np.bool_), np.array([1])])
    def test_flag_is_one_bool(self, name, array):
        assert_rejected(f"{name}: must be one BOOL of shape [1], got", **{name: array})

    def test_cumulative_logprob_alone_sets_logprobs_to_0(self):
        request, options = parse(return_cumulative_logprob=flag(True))
        assert request.params == SamplingParams(logprobs=0)
        assert not options.has_logprobs
        request, options = parse(return_cumulative_logprob=flag(True), parameters='{"logprobs": 2}')
        assert request.params == SamplingParams(logprobs=2)


@given(
    st.dictionaries(
        st.sampled_from(["max_tokens", "temperature", "stop", "seed", "lora_name", "cache_salt", "priority", "id"]),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.lists(st.text(max_size=3)),
    ),
    st.binary(max_size=40),
)
def test_any_input_is_parsed_or_rejected(parameters, prompt):
    try:
        request, _ = parse(text_input=strings(prompt), parameters=json.dumps(parameters))
    except QuireError as error:
        code, message = error_response(error)
        assert (code, message.encode()) == (Code.INVALID_ARG, message.encode())
    else:
        assert list(FrameDecoder().feed(encode_frame(request))) == [request]


def tensors_of(delta, options, **last_sent):
    """Return the tensors of a response with one output; `last_sent` are fields of the previous response's delta."""
    return to_output_tensors([delta], options, [OutputDelta(delta.id, **last_sent)])


class TestOutputs:
    def all_outputs(self, **inputs):
        flags = {f"return_{name}": flag(True) for name in RETURNS}
        return parse(**flags, **inputs)[1]

    def test_text_with_prompt_by_default(self):
        tensors = tensors_of(OutputDelta(7, " world", [1], "stop"), parse()[1])
        assert {name: list(array) for name, array in tensors.items()} == {"text_output": [b"Hello world"]}

    def test_types_and_shapes_match_the_model_config(self):
        delta = OutputDelta(
            7, "a", [5, 6], "length", -1.5, [[TokenLogprob(5, -1.0, 1)], [TokenLogprob(6, -1.0, 1)]], 3, 2
        )
        transfer = json.dumps({"do_remote_decode": True})
        parameters = json.dumps({"logprobs": 1, "kv_transfer_params": transfer})
        tensors = tensors_of(delta, self.all_outputs(parameters=parameters))
        kinds = {"TYPE_STRING": np.object_, "TYPE_FP32": np.float32, "TYPE_UINT32": np.uint32, "TYPE_INT64": np.int64}
        assert {name: (array.dtype.type, array.ndim) for name, array in tensors.items()} == {
            name: (kinds[kind], 1) for name, kind, _ in OUTPUTS
        }
        assert all(array.shape == (1,) for name, array in tensors.items() if name != "output_ids")

    def test_kv_transfer_params(self):
        role = {"do_remote_decode": True, "remote_host": None, "remote_block_ids": [2**70], "other": {}}
        for parameters, inputs in (
            (json.dumps({"kv_transfer_params": json.dumps(role)}), {}),
            ("{}", {"sampling_parameters": strings(json.dumps({"kv_transfer_params": role}))}),
        ):
            request, options = parse(parameters=parameters, **inputs)
            assert request.kv_transfer_params == KVTransferParams(do_remote_decode=True)
            delta = OutputDelta(7, "a", [5], "stop", kv_transfer_params={"remote_host": "10.0.0.1"})
            assert tensors_of(delta, options)["kv_transfer_params"].tolist() == [b'{"remote_host": "10.0.0.1"}']
        request, options = parse(parameters=json.dumps({"kv_transfer_params": json.dumps({"do_remote_prefill": True})}))
        assert request.kv_transfer_params.do_remote_prefill and not options.kv_transfer_params
        for value in ("x", "[1]", 5, '{"remote_port": "8005"}', '{"quire": {}}', r'{"remote_host": "\ud800"}'):
            assert_rejected("kv_transfer_params", parameters=json.dumps({"kv_transfer_params": value}))

    def test_values_while_streaming(self):
        options = self.all_outputs(stream=flag(True), parameters='{"logprobs": 0}')
        entry = {"5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}
        tensors = tensors_of(
            OutputDelta(7, "a", [5], None, -2.5, [[TokenLogprob(5, -0.5, 1, "a")]], 3, 10), options, num_output_tokens=9
        )
        assert {name: array.tolist() for name, array in tensors.items()} == {
            "text_output": [b"a"],
            "finish_reason": [b"None"],
            "cumulative_logprob": [-2.5],
            "logprobs": [json.dumps([entry]).encode()],
            "num_input_tokens": [3],
            "num_output_tokens": [1],
            "output_ids": [5],
            "prompt_logprobs": [b"null"],
        }

    def test_missing_values(self):
        tensors = tensors_of(OutputDelta(7, "a", [5], "stop", -1.0, [[TokenLogprob(5, -1.0, 1)]]), self.all_outputs())
        assert (tensors["logprobs"].tolist(), tensors["cumulative_logprob"].tolist()) == ([b"null"], [-1.0])
        options = self.all_outputs(stream=flag(True), parameters='{"logprobs": 1}')
        assert tensors_of(OutputDelta(7, "a"), options)["logprobs"].tolist() == [b"[]"]
        assert np.isnan(tensors_of(OutputDelta(7, "a", [5]), self.all_outputs())["cumulative_logprob"][0])


class TestSeveralOutputs:
    def options(self, **inputs):
        return TestOutputs().all_outputs(parameters='{"n": 3, "logprobs": 0}', **inputs)

    def test_all_in_one_response(self):
        options = self.options()
        deltas = [
            OutputDelta(7, c, [i], "stop", -1.0 * i, [[]], 3, 1, index=i, other_outputs_pending=i > 0)
            for i, c in ((2, "c"), (1, "b"))
        ]
        deltas.append(OutputDelta(7, "a", [5, 6], "length", -9.0, [[], []], 3, 2))
        initial = initial_outputs(7, options)
        tensors = to_output_tensors(merge_by_output(deltas, initial), options, initial)
        assert {name: array.tolist() for name, array in tensors.items()} == {
            "text_output": [b"Helloa", b"Hellob", b"Helloc"],
            "finish_reason": [b"length", b"stop", b"stop"],
            "cumulative_logprob": [-9.0, -1.0, -2.0],
            "logprobs": [b"[{}, {}]", b"[{}]", b"[{}]"],
            "num_input_tokens": [3],
            "num_output_tokens": [2, 1, 1],
            "output_ids": [5, 6, 1, 2],
            "prompt_logprobs": [b"null"],
        }

    def test_output_without_new_content_keeps_its_finish_reason(self):
        options = self.options(stream=flag(True))
        initial = initial_outputs(7, options)
        first = merge_by_output(
            [OutputDelta(7, "x", [1], "stop", -1.0, [[]], 3, 1, index=1, other_outputs_pending=True)], initial
        )
        assert [delta.text for delta in first] == ["", "x", ""]
        assert to_output_tensors(first, options, initial)["num_input_tokens"].tolist() == [3]
        second = merge_by_output(
            [OutputDelta(7, "y", [2], None, -2.0, [[]], 3, 1), OutputDelta(7, "z", [3], None, -4.0, [[]], 3, 2)], first
        )
        tensors = {name: array.tolist() for name, array in to_output_tensors(second, options, first).items()}
        assert tensors["text_output"] == [b"yz", b"", b""]
        assert tensors["finish_reason"] == [b"None", b"stop", b"None"]
        assert tensors["num_output_tokens"] == [2, 0, 0]
        assert tensors["logprobs"] == [b"[{}, {}]", b"[]", b"[]"]
        assert tensors["cumulative_logprob"] == [-4.0, -1.0, 0.0]


class TestMerge:
    def test_concatenates_content(self):
        deltas = [
            OutputDelta(7, "a", [1], None, -1.0, [[TokenLogprob(1, -1.0, 1)]], 3, 1),
            OutputDelta(7, "", [], None, -1.0, None, 3, 1),
            OutputDelta(7, "bc", [2, 3], "stop", -3.0, [[TokenLogprob(2, -1.0, 1)], [TokenLogprob(3, -1.0, 1)]], 3, 3),
        ]
        assert merge_deltas(deltas) == OutputDelta(
            7,
            "abc",
            [1, 2, 3],
            "stop",
            -3.0,
            [[TokenLogprob(1, -1.0, 1)], [TokenLogprob(2, -1.0, 1)], [TokenLogprob(3, -1.0, 1)]],
            3,
            3,
        )

    def test_single_delta_is_unchanged_and_missing_logprobs_stay_none(self):
        assert merge_deltas([OutputDelta(7, "a")]) == OutputDelta(7, "a")
        assert merge_deltas([OutputDelta(7, "a"), OutputDelta(7, "b")]).logprobs is None

    def test_keeps_prompt_logprobs(self):
        deltas = [OutputDelta(7, prompt_logprobs=[None, [TokenLogprob(5, -1.0, 1)]]), OutputDelta(7, "b", [2])]
        assert merge_deltas(deltas).prompt_logprobs == [None, [TokenLogprob(5, -1.0, 1)]]
        assert merge_deltas([deltas[1], deltas[0]]).prompt_logprobs == [None, [TokenLogprob(5, -1.0, 1)]]


def test_forwarded_headers_are_ignored_unless_they_are_parameters():
    text = '{"x-user": "bob", "max_tokens": 3, "y-user": "eve"}'
    inputs = {"text_input": strings("Hello")}
    request, _ = parse_request(7, "tales", "tales", inputs, text, re.compile(".-.*|max_tokens"))
    assert request.params == SamplingParams(max_tokens=3)
    assert request.client == ""
    text = '{"X-Gateway-Inference-Fairness-Id": "bob"}'
    assert parse_request(7, "tales", "tales", inputs, text, re.compile("(?i)x-.*"))[0].client == "bob"
    text = '{"x-user": "bob", "max_tokens": 3, "y-user": "eve"}'
    with pytest.raises(InvalidArgument, match="unknown sampling parameter 'y-user'"):
        parse_request(7, "tales", "tales", inputs, text, re.compile("x-.*"))


class TestErrors:
    def test_message_begins_with_the_code(self):
        assert error_response(Unavailable("queue is full")) == (Code.UNAVAILABLE, "UNAVAILABLE: queue is full")

    def test_message_is_truncated_and_encodable(self):
        _, message = error_response(InvalidArgument("x" * 5000 + "\ud800"))
        assert len(message) == MAX_ERROR_CHARS
        assert error_response(InvalidArgument("bad \ud800"))[1].encode() == b"INVALID_ARG: bad \\ud800"

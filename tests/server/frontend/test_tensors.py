# SPDX-License-Identifier: Apache-2.0
"""Requests to Submit and Event to tensors, with vllm_backend's meanings."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_server.frontend import tensors as server_tensors
from quire_server.model_server.model_interface import OUTPUTS
from quire_spec.errors import Code, InvalidArgument, QuireError, Unavailable
from quire_spec.protocol.framing import FrameDecoder, encode_frame
from quire_spec.protocol.messages import OutputDelta, merge_deltas

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


def read(model="tales", parameters="{}", **inputs):
    """read_request with `text_input` "Hello" unless told otherwise."""
    if "text_input" not in inputs and "input_ids" not in inputs:
        inputs["text_input"] = strings("Hello")
    given = {name: array for name, array in inputs.items() if array is not None}
    return server_tensors.parse_request(7, model, "tales", given, parameters)


def refused(*words, **kwargs):
    with pytest.raises(InvalidArgument) as caught:
        read(**kwargs)
    assert all(word in str(caught.value) for word in words), caught.value


class TestPrompt:
    def test_defaults(self):
        submit, wanted = read()
        assert (submit.id, submit.model, submit.prompt, submit.prompt_token_ids) == (7, "tales", "Hello", None)
        assert (submit.params, submit.stream, submit.cache_salt) == ({}, False, None)
        assert wanted.prompt_prefix == "Hello"
        assert not any(getattr(wanted, name) for name in RETURNS)

    def test_ids_instead_of_text(self):
        submit, wanted = read(input_ids=np.array([1, 2, 2**40]))
        assert (submit.prompt, submit.prompt_token_ids) == (None, [1, 2, 2**40])
        assert (wanted.prompt_prefix, wanted.output_ids) == ("", True)
        assert not read(input_ids=np.array([1]), return_output_ids=flag(False))[1].output_ids

    def test_both_or_neither(self):
        refused("text_input, input_ids: both", text_input=strings("x"), input_ids=np.array([1]))
        refused("text_input, input_ids: neither", text_input=None)

    @pytest.mark.parametrize("text", [b"\xff", b"ok \xc3", b"\xed\xa0\x80"])
    def test_invalid_utf8(self, text):
        refused("text_input: not valid UTF-8 at byte", text_input=strings(text))

    @pytest.mark.parametrize("array", [strings(), strings("a", "b"), np.array([["a", "b"]], np.object_)])
    def test_one_prompt_per_request(self, array):
        refused("text_input: shape", "one prompt", text_input=array)

    def test_text_of_another_type(self):
        refused("text_input: float64 is not a string", text_input=np.array([1.5]))

    @pytest.mark.parametrize("array", [np.array([[1, 2]]), np.array(3), np.array([1.0]), np.array([True])])
    def test_ids_of_another_shape_or_type(self, array):
        refused("input_ids: shape", text_input=None, input_ids=array)

    def test_ids_that_cannot_be(self):
        refused("input_ids: token -5 at position 1", text_input=None, input_ids=np.array([3, -5]))
        refused("input_ids: empty", text_input=None, input_ids=np.array([], np.int64))

    def test_a_prompt_beyond_any_context(self):
        refused("text_input: 16777217 bytes", text_input=strings(b"x" * (server_tensors.MAX_PROMPT_BYTES + 1)))
        refused("input_ids: ", "more than any", text_input=None, input_ids=np.ones(2**21 + 1, np.int64))


class TestParameters:
    def test_from_request_parameters(self):
        assert read(parameters='{"max_tokens": 5, "temperature": "0.5"}')[0].params == {
            "max_tokens": 5,
            "temperature": 0.5,
        }

    def test_from_the_tensor_as_vllm_backends_clients_send_them(self):
        tensor = strings('{"temperature": "0.1", "top_p": "0.95", "max_tokens": "100", "stop": ["a"]}')
        assert read(sampling_parameters=tensor)[0].params == {
            "temperature": 0.1,
            "top_p": 0.95,
            "max_tokens": 100,
            "stop": ["a"],
        }

    def test_the_tensor_wins_and_the_others_count_too(self):
        submit, _ = read(
            parameters='{"max_tokens": 5, "seed": 3}', sampling_parameters=strings('{"max_tokens": 9, "top_k": 2}')
        )
        assert submit.params == {"max_tokens": 9, "seed": 3, "top_k": 2}

    def test_null_means_default(self):
        assert read(sampling_parameters=strings('{"max_tokens": null, "lora_name": null}'))[0].params == {}

    def test_lists_as_json_text_since_generate_takes_no_arrays(self):
        assert read(parameters=json.dumps({"stop": '["x", "y"]'}))[0].params == {"stop": ["x", "y"]}

    def test_the_servers_own_fields_are_not_parameters(self):
        own = {"id": "42", "timeout": 5, "sequence_id": 7, "sequence_start": True, "sequence_end": True}
        assert read(parameters=json.dumps(own | {"binary_data_output": True, "max_tokens": 2}))[0].params == {
            "max_tokens": 2
        }
        refused("unknown sampling parameter 'id'", sampling_parameters=strings('{"id": 1}'))

    @pytest.mark.parametrize(
        ("parameters", "words"),
        [
            ({"best_off": 2}, ("unknown sampling parameter 'best_off'", "max_tokens")),
            ({"temperature": -1}, ("'temperature'", "-1", "0 to 100")),
            ({"stop": 5}, ("'stop'",)),
            ({"stop": '["\\ud800"]'}, ("'stop'", "lone surrogate")),
            ({"stop": "[" * 100_000}, ("'stop'",)),
            (
                {"max_new_tokens": 5},
                ("unknown sampling parameter 'max_new_tokens'; did you mean max_tokens? Known are",),
            ),
            ({"lora_nam": "sql"}, ("did you mean lora_name? Known are",)),
            ({"return_finish_reasons": True}, ("did you mean return_finish_reason? Known are",)),
            ({"lora_name": 5}, ("lora_name: 5 is not a text",)),
            ({"lora_name": ""}, ("lora_name: '' is not a text",)),
            ({"lora_name": "\ud800"}, ("lora_name", "lone surrogate")),
            ({"cache_salt": True}, ("cache_salt",)),
            ({"priority": "urgent"}, ("priority: 'urgent' is not an integer",)),
            ({"priority": 1.5}, ("priority: 1.5 is",)),
            ({"priority": True}, ("priority: True is",)),
        ],
    )
    def test_wrong_ones_are_named(self, parameters, words):
        refused(*words, parameters=json.dumps(parameters))
        refused(*words, sampling_parameters=strings(json.dumps(parameters)))

    @pytest.mark.parametrize("text", ["", "{", "[1]", "5", "[" * 100_000, b"\xff"])
    def test_a_tensor_that_is_not_an_object(self, text):
        refused("sampling_parameters: ", sampling_parameters=strings(text))

    def test_two_sets_of_parameters(self):
        refused("sampling_parameters: shape [2]", sampling_parameters=strings("{}", "{}"))

    def test_salt(self):
        assert read(parameters='{"cache_salt": "tenant"}')[0].cache_salt == "tenant"

    @pytest.mark.parametrize(("value", "priority"), [("-3", -3), ('"7"', 7), ("null", 0)])
    def test_priority(self, value, priority):
        submit, _ = read(parameters=f'{{"priority": {value}}}')
        assert (submit.priority, submit.params) == (priority, {})


class TestModel:
    @pytest.mark.parametrize("where", ["parameters", "tensor"])
    def test_lora_name_from_either_place(self, where):
        text = '{"lora_name": "sql"}'
        submit, _ = read(parameters=text) if where == "parameters" else read(sampling_parameters=strings(text))
        assert (submit.model, submit.params) == ("sql", {})

    def test_an_adapters_own_model(self):
        assert read(model="sql")[0].model == "sql"
        assert read(model="sql", parameters='{"lora_name": "sql"}')[0].model == "sql"

    def test_an_adapter_of_an_adapter(self):
        refused("lora_name: 'pirate'", "'sql'", "'tales'", model="sql", parameters='{"lora_name": "pirate"}')


class TestFlags:
    def test_stream_and_prompt(self):
        assert read(stream=flag(True))[1].prompt_prefix == ""
        assert read(stream=flag(True), exclude_input_in_output=flag(True))[0].stream
        assert read(exclude_input_in_output=flag(True))[1].prompt_prefix == ""
        assert read(exclude_input_in_output=flag(False))[1].prompt_prefix == "Hello"
        refused("exclude_input_in_output", "stream", stream=flag(True), exclude_input_in_output=flag(False))
        refused(
            "exclude_input_in_output",
            "input_ids",
            text_input=None,
            input_ids=np.array([1]),
            exclude_input_in_output=flag(False),
        )

    @pytest.mark.parametrize("name", ["stream", "exclude_input_in_output", *(f"return_{r}" for r in RETURNS)])
    @pytest.mark.parametrize("array", [np.array([True, False]), np.array([], np.bool_), np.array([1])])
    def test_a_flag_is_one_bool(self, name, array):
        refused(f"{name}: shape", **{name: array})

    def test_cumulative_logprob_alone_asks_for_the_least_logprobs(self):
        submit, wanted = read(return_cumulative_logprob=flag(True))
        assert submit.params == {"logprobs": 0}
        assert not wanted.has_logprobs
        submit, wanted = read(return_cumulative_logprob=flag(True), parameters='{"logprobs": 2}')
        assert submit.params == {"logprobs": 2}


@given(
    st.dictionaries(
        st.sampled_from(["max_tokens", "temperature", "stop", "seed", "lora_name", "cache_salt", "priority", "id"]),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.lists(st.text(max_size=3)),
    ),
    st.binary(max_size=40),
)
def test_whatever_comes_is_read_or_refused_by_name(parameters, prompt):
    try:
        submit, _ = read(text_input=strings(prompt), parameters=json.dumps(parameters))
    except QuireError as error:
        code, message = server_tensors.error_response(error)
        assert (code, message.encode()) == (Code.INVALID_ARG, message.encode())
    else:
        assert list(FrameDecoder().feed(encode_frame(submit))) == [submit]


def tensors_of(event, wanted, **told):
    """What a response to a request of one output holds; `told` is what earlier ones told of it."""
    return server_tensors.to_output_tensors([event], wanted, [OutputDelta(event.id, **told)])


class TestOutputs:
    def everything(self, **inputs):
        flags = {f"return_{name}": flag(True) for name in RETURNS}
        return read(**flags, **inputs)[1]

    def test_text_alone_with_the_prompt(self):
        tensors = tensors_of(OutputDelta(7, " world", [1], "stop"), read()[1])
        assert {name: list(array) for name, array in tensors.items()} == {"text_output": [b"Hello world"]}

    def test_types_and_shapes_are_those_of_the_config(self):
        event = OutputDelta(7, "a", [5, 6], "length", -1.5, [{"5": {}}, {"6": {}}], 3, 2)
        tensors = tensors_of(event, self.everything(parameters='{"logprobs": 1}'))
        kinds = {"TYPE_STRING": np.object_, "TYPE_FP32": np.float32, "TYPE_UINT32": np.uint32, "TYPE_INT64": np.int64}
        assert {name: (array.dtype.type, array.ndim) for name, array in tensors.items()} == {
            name: (kinds[kind], 1) for name, kind, _ in OUTPUTS
        }
        assert all(array.shape == (1,) for name, array in tensors.items() if name != "output_ids")

    def test_values_while_streaming(self):
        wanted = self.everything(stream=flag(True), parameters='{"logprobs": 0}')
        entry = {"5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}
        tensors = tensors_of(OutputDelta(7, "a", [5], None, -2.5, [entry], 3, 10), wanted, num_output_tokens=9)
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

    def test_logprobs_that_were_not_asked_for_are_null(self):
        tensors = tensors_of(OutputDelta(7, "a", [5], "stop", -1.0, [{"5": {}}]), self.everything())
        assert tensors["logprobs"].tolist() == [b"null"]
        assert tensors["cumulative_logprob"].tolist() == [-1.0]

    def test_positions_without_news_are_an_empty_list(self):
        wanted = self.everything(stream=flag(True), parameters='{"logprobs": 1}')
        assert tensors_of(OutputDelta(7, "a"), wanted)["logprobs"].tolist() == [b"[]"]

    def test_a_sum_that_is_not_there_is_not_a_number(self):
        assert np.isnan(tensors_of(OutputDelta(7, "a", [5]), self.everything())["cumulative_logprob"][0])


class TestSeveralOutputs:
    def wanted(self, **inputs):
        return TestOutputs().everything(parameters='{"n": 3, "logprobs": 0}', **inputs)

    def test_all_at_once(self):
        wanted = self.wanted()
        events = [
            OutputDelta(7, c, [i], "stop", -1.0 * i, [{}], 3, 1, index=i, other_outputs_pending=i > 0)
            for i, c in ((2, "c"), (1, "b"))
        ]
        events.append(OutputDelta(7, "a", [5, 6], "length", -9.0, [{}, {}], 3, 2))
        told = server_tensors.initial_outputs(7, wanted)
        tensors = server_tensors.to_output_tensors(server_tensors.merge_by_output(events, told), wanted, told)
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

    def test_an_output_without_news_is_empty_and_keeps_its_end(self):
        wanted = self.wanted(stream=flag(True))
        told = server_tensors.initial_outputs(7, wanted)
        first = server_tensors.merge_by_output(
            [OutputDelta(7, "x", [1], "stop", -1.0, [{}], 3, 1, index=1, other_outputs_pending=True)], told
        )
        assert [event.text for event in first] == ["", "x", ""]
        assert server_tensors.to_output_tensors(first, wanted, told)["num_input_tokens"].tolist() == [3]
        second = server_tensors.merge_by_output(
            [OutputDelta(7, "y", [2], None, -2.0, [{}], 3, 1), OutputDelta(7, "z", [3], None, -4.0, [{}], 3, 2)], first
        )
        tensors = {
            name: array.tolist() for name, array in server_tensors.to_output_tensors(second, wanted, first).items()
        }
        assert tensors["text_output"] == [b"yz", b"", b""]
        assert tensors["finish_reason"] == [b"None", b"stop", b"None"]
        assert tensors["num_output_tokens"] == [2, 0, 0]
        assert tensors["logprobs"] == [b"[{}, {}]", b"[]", b"[]"]
        assert tensors["cumulative_logprob"] == [-4.0, -1.0, 0.0]


class TestMerge:
    def test_says_what_its_events_say(self):
        events = [
            OutputDelta(7, "a", [1], None, -1.0, [{"1": {}}], 3, 1),
            OutputDelta(7, "", [], None, -1.0, None, 3, 1),
            OutputDelta(7, "bc", [2, 3], "stop", -3.0, [{"2": {}}, {"3": {}}], 3, 3),
        ]
        assert merge_deltas(events) == OutputDelta(
            7, "abc", [1, 2, 3], "stop", -3.0, [{"1": {}}, {"2": {}}, {"3": {}}], 3, 3
        )

    def test_one_event_is_itself_and_no_logprobs_stay_none(self):
        assert merge_deltas([OutputDelta(7, "a")]) == OutputDelta(7, "a")
        assert merge_deltas([OutputDelta(7, "a"), OutputDelta(7, "b")]).logprobs is None

    def test_log_probabilities_of_the_prompt_are_kept(self):
        events = [OutputDelta(7, prompt_logprobs=[None, {"5": {}}]), OutputDelta(7, "b", [2])]
        assert merge_deltas(events).prompt_logprobs == [None, {"5": {}}]
        assert merge_deltas([events[1], events[0]]).prompt_logprobs == [None, {"5": {}}]


class TestErrors:
    def test_the_message_begins_with_the_code(self):
        assert server_tensors.error_response(Unavailable("queue is full")) == (
            Code.UNAVAILABLE,
            "UNAVAILABLE: queue is full",
        )

    def test_long_ones_are_cut_and_all_can_be_sent(self):
        _, message = server_tensors.error_response(InvalidArgument("x" * 5000 + "\ud800"))
        assert len(message) == server_tensors.MAX_ERROR_CHARS
        assert server_tensors.error_response(InvalidArgument("bad \ud800"))[1].encode() == b"INVALID_ARG: bad \\ud800"

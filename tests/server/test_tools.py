"""Tools: what the prompt says of them, calls that are forced, calls of the model's own will, and results in the history."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aioengine.errors import ConfigError
from aioengine.server import ServerSettings
from aioengine.server.prompts import adapt
from aioengine.server.tool_calls import CallArguments, CallStart, TextPiece
from aioengine.server.tool_formats import HERMES, LLAMA3, MISTRAL, FormattedCalls, ToolFormat, detect_format
from aioengine.testing import FakeTokenizer, scripted

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "hot": {"type": "boolean"}},
            "required": ["city", "hot"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


def calls_of(chunks: list[Any]) -> list[dict[str, Any]]:
    """What a client puts together from the deltas of a stream."""
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for delta in choice["delta"].get("tool_calls") or ():
                if "id" in delta:
                    assert delta["index"] not in calls
                    assert delta["type"] == "function"
                    calls[delta["index"]] = {"id": delta["id"], "name": delta["function"]["name"], "arguments": ""}
                calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
    assert list(calls) == list(range(len(calls)))
    return list(calls.values())


# ------------------------------------------------------------------ forced, with a model that knows nothing
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_forced_call_fits_its_schema_whatever_the_model(served: Any, stream: bool, choice: Any, seed: int) -> None:
    fields = {
        "tools": [WEATHER, TIME],
        "tool_choice": choice,
        "max_tokens": 1500,
        "temperature": 1,
        "seed": seed,
        "parallel_tool_calls": False,
    }
    if stream:
        chunks = await served.chunks(**fields)
        found = [(call["name"], call["arguments"]) for call in calls_of(chunks)]
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choices = (await served.chat(**fields))["choices"]
        assert choices[0]["message"]["content"] is None
        found = [(call["function"]["name"], call["function"]["arguments"]) for call in choices[0]["message"]["tool_calls"]]
        reason = choices[0]["finish_reason"]
    ((name, arguments),) = found
    assert reason == "tool_calls"
    assert name in (("get_weather",) if isinstance(choice, dict) else ("get_weather", "get_time"))
    read = json.loads(arguments)
    assert set(read) == ({"city", "hot"} if name == "get_weather" else set())


async def test_several_calls_come_where_they_may(serve: Any) -> None:
    text = '[{"name": "get_time", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Rome", "hot": true}}]'
    async with serve(scripted(text)) as served:
        fields = {"tools": [WEATHER, TIME], "tool_choice": "required", "max_tokens": 500}
        calls = (await served.chat(**fields))["choices"][0]["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["get_time", "get_weather"]
        assert json.loads(calls[1]["function"]["arguments"]) == {"city": "Rome", "hot": True}
        assert len({call["id"] for call in calls}) == 2
        streamed = calls_of(await served.chunks(**fields))
        assert [(c["name"], c["arguments"]) for c in streamed] == [(c["function"]["name"], c["function"]["arguments"]) for c in calls]
        one = (await served.chat(**fields, parallel_tool_calls=False))["choices"][0]["message"]["tool_calls"]
        assert len(one) == 1


async def test_schemas_may_refer_to_themselves_and_to_their_own_definitions(served: Any) -> None:
    def tool(name: str, kind: str) -> dict[str, Any]:
        parameters = {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/X"}},
            "required": ["x"],
            "$defs": {"X": {"type": kind}},
        }
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    fields = {"tools": [tool("a", "boolean"), tool("b", "null")], "tool_choice": "required", "max_tokens": 1500, "temperature": 1}
    for seed in range(3):
        calls = (await served.chat(**fields, parallel_tool_calls=False, seed=seed))["choices"][0]["message"]["tool_calls"]
        value = json.loads(calls[0]["function"]["arguments"])["x"]
        assert value is None if calls[0]["function"]["name"] == "b" else isinstance(value, bool)


async def test_a_call_that_is_cut_off_says_so(served: Any) -> None:
    choice = (await served.chat(tools=[WEATHER], tool_choice="required", max_tokens=4))["choices"][0]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nothing"}}}, "nothing"),
        ({"tools": [WEATHER, WEATHER]}, "two tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "custom"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "name"),
        ({"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": 7}}}], "tool_choice": "required"}, "structured"),
    ],
)
async def test_tools_that_make_no_sense_are_refused(served: Any, fields: dict[str, Any], word: str) -> None:
    error = (await served.chat(**fields, status=400))["error"]
    assert word in error["message"]


async def test_allowed_tools_leave_the_others_out(served: Any) -> None:
    names = [{"type": "function", "function": {"name": "get_time"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": names}}
    answer = await served.chat(tools=[WEATHER, TIME], tool_choice=choice, max_tokens=500, parallel_tool_calls=False)
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_time"


# ------------------------------------------------------------------ of the model's own will
@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_calls_by_its_own_format(serve: Any, stream: bool) -> None:
    text = 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "hot": false}}\n</tool_call>'
    async with serve(scripted(text)) as served:
        fields = {"tools": [WEATHER], "max_tokens": 500}
        if stream:
            chunks = await served.chunks(**fields)
            content = "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])
            calls = calls_of(chunks)
            choice = chunks[-1]["choices"][0]
            assert sum(bool(c["delta"].get("tool_calls")) for chunk in chunks for c in chunk["choices"]) > 3, "arguments are streamed"
        else:
            choice = (await served.chat(**fields))["choices"][0]
            content = choice["message"]["content"]
            calls = [{"id": call["id"], **call["function"]} for call in choice["message"]["tool_calls"]]
        assert content == "I look."
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("get_weather", {"city": "Rome", "hot": False})]
        assert choice["finish_reason"] == "tool_calls"


async def test_none_leaves_calls_as_text_and_tools_out_of_the_prompt(serve: Any) -> None:
    text = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    async with serve(scripted(text)) as served:
        plain = await served.chat(max_tokens=500)
        answer = await served.chat(tools=[TIME], tool_choice="none", max_tokens=500)
        assert answer["choices"][0]["message"]["content"] == text
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
        offered = await served.chat(tools=[TIME], max_tokens=500)
        assert offered["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]


async def test_results_of_tools_go_into_the_prompt(served: Any) -> None:
    history = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny in Rome"},
    ]
    tokens = (await served.post("/tokenize", {"messages": history, "tools": [WEATHER]}))["tokens"]
    text = (await served.post("/detokenize", {"tokens": tokens}))["prompt"]
    assert "Sunny in Rome" in text
    assert '{"name": "get_weather", "arguments": {"city": "Rome"}}' in text
    assert "The weather" in text
    assert (await served.chat(messages=history, tools=[WEATHER]))["usage"]["prompt_tokens"] == len(tokens)


# ------------------------------------------------------------------ the parsers, however the text is cut
CALL_A = ("a", {"x": 'q"}\\{', "y": [1, {"z": None}]})
CALL_B: tuple[str, Any] = ("b", {})


def written(call: tuple[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]})


UNKNOWN = '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'

ANSWERS: list[tuple[ToolFormat, str, str, list[tuple[str, Any]]]] = [
    (HERMES, "just text, <b>bold</b> and 1 < 2", "just text, <b>bold</b> and 1 < 2", []),
    (HERMES, f"<tool_call>\n{written(CALL_A)}\n</tool_call>", "", [CALL_A]),
    (HERMES, f"Hm. \n<tool_call>{written(CALL_A)}</tool_call>\n<tool_call>\n{written(CALL_B)}\n</tool_call>\n", "Hm.", [CALL_A, CALL_B]),
    (HERMES, f"<tool_call>[{written(CALL_A)}, {written(CALL_B)}]</tool_call>", "", [CALL_A, CALL_B]),
    (HERMES, f"<tool_call>{written(CALL_A)}</tool_call>Done.", "Done.", [CALL_A]),
    (HERMES, f"<tool_call>{written(CALL_A)}", "", [CALL_A]),
    (HERMES, '<tool_call>{"arguments": {"n": 1}, "name": "a"}</tool_call>', "", [("a", {"n": 1})]),
    (HERMES, '<tool_call>{"name": "a", "arguments": "{\\"n\\": 1}"}</tool_call>', "", [("a", {"n": 1})]),
    (HERMES, '<tool_call>{"name": "a"}</tool_call>', "", [("a", {})]),
    (
        HERMES,
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        [],
    ),
    (HERMES, "<tool_call>nonsense</tool_call> and so on", "<tool_call>nonsense</tool_call> and so on", []),
    (HERMES, "<tool_call>", "<tool_call>", []),
    (HERMES, "<tool_", "<tool_", []),
    (HERMES, "ends with space  \n", "ends with space  \n", []),
    (LLAMA3, written(CALL_A, "parameters"), "", [CALL_A]),
    (LLAMA3, f"<|python_tag|>{written(CALL_A, 'parameters')}", "", [CALL_A]),
    (LLAMA3, f"{written(CALL_A, 'parameters')}; {written(CALL_B, 'parameters')}", "", [CALL_A, CALL_B]),
    (LLAMA3, '{"some": "json"} as an answer', '{"some": "json"} as an answer', []),
    (LLAMA3, "The set {1, 2}", "The set {1, 2}", []),
    (MISTRAL, f"[TOOL_CALLS] [{written(CALL_A)}, {written(CALL_B)}]", "", [CALL_A, CALL_B]),
    (MISTRAL, f"[TOOL_CALLS]a[ARGS]{json.dumps(CALL_A[1])}[TOOL_CALLS]b[ARGS]{{}}", "", [CALL_A, CALL_B]),
    (MISTRAL, f"[TOOL_CALLS]a[CALL_ID]123456789[ARGS]{json.dumps(CALL_A[1])}", "", [CALL_A]),
    (MISTRAL, f"Well. [TOOL_CALLS]a{json.dumps(CALL_A[1])}", "Well.", [CALL_A]),
    (MISTRAL, "[TOOL_CALLS]unknown[ARGS]{}", "[TOOL_CALLS]unknown[ARGS]{}", []),
    (MISTRAL, "a list [1, 2]", "a list [1, 2]", []),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), ANSWERS, ids=range(len(ANSWERS)))
def test_a_parser_finds_the_same_however_the_text_is_cut(
    tool_format: ToolFormat, text: str, content: str, calls: list[tuple[str, Any]], size: int
) -> None:
    parser = FormattedCalls(tool_format, {"a", "b"}, parallel=True)
    pieces = [piece for start in range(0, len(text), size) for piece in parser.push(text[start : start + size])] + parser.finish()
    assert "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)) == content
    names = [piece.name for piece in pieces if isinstance(piece, CallStart)]
    assert names == [name for name, _ in calls]
    assert [piece.number for piece in pieces if isinstance(piece, CallStart)] == list(range(len(calls)))
    for number, (_, arguments) in enumerate(calls):
        given = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments) and piece.number == number)
        assert json.loads(given) == arguments
    assert parser.num_calls == len(calls) or not text.endswith("}")


def test_only_the_first_call_counts_where_one_may_come() -> None:
    parser = FormattedCalls(HERMES, {"a", "b"}, parallel=False)
    text = f"<tool_call>{written(CALL_A)}</tool_call><tool_call>{written(CALL_B)}</tool_call>"
    starts = [piece for piece in parser.push(text) + parser.finish() if isinstance(piece, CallStart)]
    assert [start.name for start in starts] == ["a"]


# ------------------------------------------------------------------ what templates know
class Templated(FakeTokenizer):
    """A template that is a function of the messages and the tools."""

    def __init__(self, *, tools_as: str = "", calls_as: str = "") -> None:
        self._tools_as, self._calls_as = tools_as, calls_as

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool = True, tools: Any = None, variables: Any = None) -> str:
        text = self._tools_as + json.dumps(tools) if tools and self._tools_as else ""
        for message in messages:
            text += message["content"]
            if message.get("tool_calls") and self._calls_as:
                text += self._calls_as + json.dumps(message["tool_calls"])
        return text


@pytest.mark.parametrize(
    ("tools_as", "calls_as", "name"),
    [
        ("<tools>", "<tool_call>", "hermes"),
        ("[AVAILABLE_TOOLS]", "[TOOL_CALLS]", "mistral"),
        ('<|start_header_id|>Respond {"name": ..., "parameters": ...}', '{"name"', "llama3_json"),
        ("", "", "hermes"),
    ],
)
def test_the_format_is_read_off_the_template(tools_as: str, calls_as: str, name: str) -> None:
    found = detect_format(Templated(tools_as=tools_as, calls_as=calls_as))
    assert found.name == name
    assert found.is_native == bool(tools_as)
    assert found.shows_history == bool(calls_as)


def test_a_template_without_tools_is_told_them_in_words() -> None:
    tool_format = detect_format(Templated())
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages, tools = adapt(
        [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "done"},
        ],
        [WEATHER],
        tool_format,
    )
    assert tools == []
    assert messages[0]["role"] == "system"
    assert "get_weather" in messages[0]["content"]
    assert messages[2] == {"role": "assistant", "content": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'}
    assert messages[3] == {"role": "user", "content": "<tool_response>\ndone\n</tool_response>"}


def test_mistral_gets_ids_of_nine_characters() -> None:
    call = {"id": "call_0123456789abcdef", "type": "function", "function": {"name": "f", "arguments": {}}}
    history: list[Any] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": ""},
    ]
    messages, _ = adapt(history, [], MISTRAL)
    assert len(messages[1]["tool_call_id"]) == 9
    assert messages[0]["tool_calls"][0]["id"] == messages[1]["tool_call_id"]


async def test_marks_that_are_special_tokens_are_seen_and_the_end_of_the_answer_is_not(serve: Any) -> None:
    """Mistral's and Llama's marks are special tokens, which are left out of texts otherwise."""
    tokenizer = Templated(tools_as="[AVAILABLE_TOOLS]", calls_as="[TOOL_CALLS]")
    async with serve(scripted('[TOOL_CALLS][{"name": "get_time", "arguments": {}}]'), tokenizer=tokenizer) as served:
        choice = (await served.chat(tools=[TIME], max_tokens=200))["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert len(call["id"]) == 9
    async with serve(scripted("Just words."), tokenizer=tokenizer) as served:
        choice = (await served.chat(tools=[TIME], max_tokens=200))["choices"][0]
        assert choice["message"]["content"] == "Just words."
        assert "<eos>" not in str(await served.chunks(tools=[TIME], max_tokens=200))


async def test_the_parser_can_be_named(serve: Any) -> None:
    settings = ServerSettings(tool_call_parser="llama3_json")
    async with serve(scripted('{"name": "get_time", "parameters": {}}'), settings=settings) as served:
        choice = (await served.chat(tools=[TIME], max_tokens=200))["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_time", "arguments": "{}"}
    with pytest.raises(ConfigError, match="hermes"):
        ServerSettings(tool_call_parser="other")

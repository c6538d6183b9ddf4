"""What the subcommands do, with an engine that has no model: output, errors, recordings, conversations, interrupts."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aioengine.cli import main
from aioengine.commands import chat, demo, runtime
from aioengine.commands.demo_view import LiveView, PlainView
from aioengine.commands.generate import ContinuationWriter
from aioengine.config import EngineConfig
from aioengine.engine.async_engine import AsyncEngine
from aioengine.engine.publish_options import PublishOptions
from aioengine.events.recording.reader import read_recording
from aioengine.events.step_event import StepEvent
from aioengine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from aioengine.sampling_params import SamplingParams
from aioengine.testing import FakeExecutor, FakeTokenizer, scripted
from aioengine_kernels import cpu

ROOT = Path(__file__).resolve().parents[2]
FakeEngines = Callable[..., list[AsyncEngine]]


@pytest.fixture
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> FakeEngines:
    """Call it to make the commands use engines without a model, all answering `answer`; returns those they built."""

    def install(answer: str, **executor_options: Any) -> list[AsyncEngine]:
        built: list[AsyncEngine] = []

        def make(config: EngineConfig, *, record: str | None = None, events: str | None = None) -> AsyncEngine:
            executor = FakeExecutor(next_token=scripted(answer), **executor_options)
            built.append(AsyncEngine(config, executor=executor, tokenizer=FakeTokenizer(), record=record, events=events))
            return built[-1]

        monkeypatch.setattr(runtime, "AsyncEngine", make)
        monkeypatch.setattr(chat, "AsyncEngine", make)
        return built

    return install


@pytest.fixture(autouse=True)
def sigint_is_left_as_it_was() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def prompts_of(engine: AsyncEngine) -> list[str]:
    """The prompts that the engine's worker was given, as text."""
    executor = engine._life.executor
    assert isinstance(executor, FakeExecutor)
    new = [request for output in executor.outputs for request in output.scheduled_new_reqs]
    return [FakeTokenizer().decode(request.prompt_token_ids, skip_special_tokens=False) for request in new]


# ---------------------------------------------------------------------------------------------------- generate
def test_generate_streams_the_answer_and_nothing_else(fake_engines: FakeEngines, capsys: pytest.CaptureFixture[str]) -> None:
    fake_engines("Paris, naturally.")
    assert main(["generate", "What is the capital of France?"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Paris, naturally.\n"
    assert captured.err == ""


def test_several_continuations_come_one_after_the_other(fake_engines: FakeEngines, capsys: pytest.CaptureFixture[str]) -> None:
    engines = fake_engines("Paris.")
    assert main(["generate", "What?", "--n", "3", "--stats"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "[1/3]\nParis.\n\n[2/3]\nParis.\n\n[3/3]\nParis.\n"
    assert "21 output tokens" in captured.err
    assert captured.err.endswith("ended by stop\n")
    assert len(prompts_of(engines[0])) == 3


def test_a_continuation_is_shown_as_it_arrives_and_the_next_ones_wait_for_their_turn() -> None:
    file = io.StringIO()
    writer = ContinuationWriter(file, num_continuations=3)
    shown = []
    for texts in (["a", "x", ""], ["ab.", "xy.", "o"], ["ab.", "xy.", "oo"]):
        completions = [CompletionOutput(i, t, [], finish_reason="stop" if t.endswith(".") else None) for i, t in enumerate(texts)]
        writer.write(RequestOutput("r", [1], completions, RequestMetrics(0.0)))
        shown.append(file.getvalue())
    assert shown == ["[1/3]\na", "[1/3]\nab.\n\n[2/3]\nxy.\n\n[3/3]\no", "[1/3]\nab.\n\n[2/3]\nxy.\n\n[3/3]\noo"]


def test_a_generation_that_breaks_off_says_why(fake_engines: FakeEngines, capsys: pytest.CaptureFixture[str]) -> None:
    fake_engines("Par\0is")
    assert main(["generate", "--raw", "Hi"]) == 0
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTokenizer, "decode", _decode_without_nul)
        assert main(["generate", "--raw", "Hi"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "Par\n"
    assert captured.err.splitlines()[-1] == "aioengine: error: the generation broke off: ValueError: NUL"


def _decode_without_nul(self: FakeTokenizer, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
    if 0 in token_ids:
        raise ValueError("NUL")
    return bytes(token_id for token_id in token_ids if token_id < 256).decode()


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ([], "<bos><|user|>Hi<eos><|assistant|>"),
        (["--system", "Be brief."], "<bos><|system|>Be brief.<eos><|user|>Hi<eos><|assistant|>"),
        (["--raw"], "<bos>Hi"),
    ],
)
def test_the_prompt_goes_through_the_chat_template_unless_it_is_raw(
    options: list[str], prompt: str, fake_engines: FakeEngines, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = fake_engines("ok")
    assert main(["generate", "Hi", *options]) == 0
    assert prompts_of(engines[0]) == [prompt]


def test_generate_reads_stdin(fake_engines: FakeEngines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engines = fake_engines("ok")
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert main(["generate", "--raw", "-"]) == 0
    assert prompts_of(engines[0]) == ["<bos>two\nlines"]


def test_stats_go_to_stderr(fake_engines: FakeEngines, capsys: pytest.CaptureFixture[str]) -> None:
    fake_engines("abcdef")
    assert main(["generate", "--raw", "Hi", "--stats", "--max-tokens", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "abc\n"
    assert "3 prompt tokens (0 cached), 3 output tokens, first token after" in captured.err
    assert captured.err.endswith("ended by length\n")


def test_a_recording_can_be_read_back(fake_engines: FakeEngines, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_engines("abc")
    path = tmp_path / "steps.jsonl"
    assert main(["generate", "--raw", "Hi", "--record", str(path)]) == 0
    recording = read_recording(path)
    steps = [event for event in recording.events if isinstance(event, StepEvent)]
    assert sum(event.output.total_num_scheduled_tokens for event in steps) >= 3 + 3
    assert recording.header.config["scheduler"]["max_num_seqs"] == 64


def test_a_request_that_cannot_run_is_one_line_and_status_2(fake_engines: FakeEngines, capsys: pytest.CaptureFixture[str]) -> None:
    engines = fake_engines("ok")
    assert main(["generate", "--raw", "x" * 100, "--max-model-len", "64"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("aioengine: error: the prompt has 101 tokens")
    assert captured.err.count("\n") == 1
    executor = engines[0]._life.executor
    assert isinstance(executor, FakeExecutor)
    assert executor.is_shut_down


def test_an_unknown_model_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--model", "no-such-model"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("aioengine: error: unknown model 'no-such-model'")
    assert captured.err.count("\n") == 1


FAKE_GENERATE = """
import sys
from aioengine.cli import main
from aioengine.commands import runtime
from aioengine.engine.async_engine import AsyncEngine
from aioengine.testing import FakeExecutor, FakeTokenizer
runtime.AsyncEngine = lambda config, record=None: AsyncEngine(
    config, executor=FakeExecutor(forward_s=0.005), tokenizer=FakeTokenizer(), record=record
)
sys.exit(main(["generate", "hi", "--max-tokens", "2000", "--ignore-eos"]))
"""


def start_fake_generate() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", FAKE_GENERATE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=0, cwd=ROOT
    )
    assert process.stdout is not None
    assert len(process.stdout.read(1)) == 1  # it has begun to answer
    return process


def test_a_reader_that_goes_away_ends_it_quietly() -> None:
    with start_fake_generate() as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(30) == 141
        assert process.stderr.read() == ""


def test_ctrl_c_ends_it_quietly() -> None:
    with start_fake_generate() as process:
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == ""


# ---------------------------------------------------------------------------------------------------- demo
def test_demo_shows_every_stream_and_sums_up(fake_engines: FakeEngines, capsys: pytest.CaptureFixture[str]) -> None:
    fake_engines("An answer.")
    assert main(["demo", "--max-tokens", "20"]) == 0
    out = capsys.readouterr().out
    for index, prompt in enumerate(demo.PROMPTS, start=1):
        assert f"[{index}] > {prompt}\n" in out
        assert f"[{index}] An answer.\n" in out
    assert "8 prompts at once, 88 tokens in" in out  # ten characters and the end of sequence
    for label in ("throughput", "first token", "steps", "KV blocks", "prefix cache", "preemptions    0", "start-up"):
        assert f"\n  {label}" in out
    assert "prefix cache   0 of" not in out, "the shared system prompt must give hits"


def test_demo_reports_why_it_failed(fake_engines: FakeEngines, capsys: pytest.CaptureFixture[str]) -> None:
    fake_engines("ok")
    assert main(["demo", "--max-model-len", "32"]) == 2
    assert "aioengine: error: the prompt has" in capsys.readouterr().err


def output(text: str, delta: str, *, finished: bool = False) -> RequestOutput:
    completion = CompletionOutput(0, text, [0] * len(text), delta, finish_reason="stop" if finished else None)
    return RequestOutput("r", [1], [completion], RequestMetrics(0.0))


def test_plain_lines_hold_the_whole_text_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(f"word{i} " for i in range(60)) + "\nlast"
    with PlainView(["A?", "B?"]) as view:
        for start in range(0, len(text), 7):
            delta = text[start : start + 7]
            view.update(0, output(text[: start + 7], delta, finished=start + 7 >= len(text)))
        view.update(1, output("unfinished", "unfinished"))
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 92
    assert " ".join(line[4:] for line in lines if line.startswith("[1] ") and ">" not in line).split() == text.split()
    assert "[2] unfinished" in lines


def test_the_live_view_shows_each_stream_and_always_has_the_same_height() -> None:
    view = LiveView(["A?", "B?"], lambda: "step 7")
    with view._console.capture() as before:
        view._console.print(view._render())
    view.update(0, output("word " * 200 + "end", "", finished=True))
    with view._console.capture() as after:
        view._console.print(view._render())
    assert "step 7" in after.get()
    assert "✓ A?" in after.get()
    assert "end" in after.get()
    assert "· B?" in after.get()
    assert after.get().count("\n") == before.get().count("\n")


# ---------------------------------------------------------------------------------------------------- chat
def test_chat_keeps_the_conversation_until_reset(
    fake_engines: FakeEngines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = fake_engines("Yes.")
    monkeypatch.setattr(sys, "stdin", io.StringIO("One?\n\nTwo?\n/reset\nThree?\n/dance\n/help\n/exit\nFour?\n"))
    assert main(["chat", "--system", "S"]) == 0
    assert prompts_of(engines[0]) == [
        "<bos><|system|>S<eos><|user|>One?<eos><|assistant|>",
        "<bos><|system|>S<eos><|user|>One?<eos><|assistant|>Yes.<eos><|user|>Two?<eos><|assistant|>",
        "<bos><|system|>S<eos><|user|>Three?<eos><|assistant|>",
    ]
    out = capsys.readouterr().out
    assert out.count("Yes.\n") == 3
    assert "unknown command /dance" in out
    assert "Ctrl-C  stops an answer" in out


def test_chat_goes_on_after_a_message_that_does_not_fit(
    fake_engines: FakeEngines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = fake_engines("Yes.")
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 100 + "\nHi\n"))
    assert main(["chat", "--max-model-len", "64"]) == 0
    assert prompts_of(engines[0]) == ["<bos><|user|>Hi<eos><|assistant|>"]
    captured = capsys.readouterr()
    assert "aioengine: error: the prompt has 104 tokens" in captured.err
    assert captured.out == "Yes.\n"


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = chat.ChatSettings(
        EngineConfig(), SamplingParams(temperature=0.0, max_tokens=500), system=None, publish=PublishOptions(), stats=False
    )

    class Terminal(io.StringIO):
        """The user presses Ctrl-C when the fifth character has arrived."""

        def write(self, text: str) -> int:
            num_written = super().write(text)
            if len(self.getvalue()) >= 5 and "\n" not in self.getvalue():
                signal.raise_signal(signal.SIGINT)
            return num_written

    with chat._LoopThread() as loop:
        executor = FakeExecutor(next_token=scripted("abcdefghij" * 50), forward_s=0.002)
        engine = AsyncEngine(settings.config, executor=executor, tokenizer=FakeTokenizer())
        loop.submit(engine.start()).result()
        conversation = chat.Conversation(engine, loop, settings)
        monkeypatch.setattr(sys, "stdout", Terminal())
        # As the command does: a process that was started in the background ignores the signal from birth.
        with runtime.interrupts_handled_by(signal.default_int_handler):
            last = conversation.ask("Go on")
        assert last is not None
        assert not last.finished
        assert conversation.messages == [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": last.text}]
        stats = engine.stats()
        assert (stats.num_running_reqs, stats.num_waiting_reqs) == (0, 0)
        assert len(executor.outputs) < 250, "the answer of 500 tokens was generated to its end"

        monkeypatch.setattr(sys, "stdout", io.StringIO())
        again = conversation.ask("And now?")
        assert again is not None
        assert again.finished
        loop.submit(engine.shutdown()).result()


def test_doctor_names_the_kernels_or_says_why_there_are_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "status", lambda: "the library was not built: no compiler")
    assert main(["doctor"]) == (0 if torch.cuda.is_available() else 1)
    assert "the library was not built: no compiler" in capsys.readouterr().out
    monkeypatch.setattr(cpu, "status", lambda: None)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "ready" in out
    assert sys.platform != "linux" or re.search(r"^cores +[\d,-]+ may be used", out, re.MULTILINE)
    assert re.search(r"kv cache +[\d.]+ GiB on the CPU, of [\d.]+ GiB free .*max_model_len", out)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_doctor_looks_for_what_triton_needs_at_its_first_launch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    monkeypatch.setattr(cpu, "status", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=141 << 30))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["doctor"]) == (1 if has_gpu else 0)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("c compiler")]
    assert "a C compiler (gcc, or the one that CC names)" in lines[0]
    assert ("missing: Triton's first launch" in lines[0]) == has_gpu


def test_doctor_says_which_path_a_model_takes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu, "status", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    paths: dict[str, str] = {}
    for kind, more in (("llama", {}), ("gemma2", {"sliding_window": 9}), ("gpt_oss", {})):
        folder = tmp_path / kind
        folder.mkdir()
        small = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}
        (folder / "config.json").write_text(json.dumps({"model_type": kind, **small, **more}))
        save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
        assert main(["doctor", str(folder)]) == (1 if kind == "gpt_oss" else 0)
        paths[kind] = capsys.readouterr().out
    assert "\npath          native: LlamaForCausalLM on the native CPU kernels, with weights=exact\n" in paths["llama"]
    assert "2 layers, 4 query and 2 key/value heads of 16" in paths["gemma2"]
    assert "\npath          transformers: there is no class here for Gemma2ForCausalLM; transformers' own code runs it" in paths["gemma2"]
    assert re.search(r"\nmodel +cannot be served: .*'GptOssForCausalLM' is not supported.*sinks", paths["gpt_oss"])
    assert main(["doctor", "no-such-model"]) == 1
    assert "model         cannot be served: unknown model 'no-such-model'" in capsys.readouterr().out

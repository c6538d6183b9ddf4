"""The command line as a user meets it: help that answers at once, and mistakes named in one line."""

from __future__ import annotations

import argparse
import dataclasses
import io
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from aioengine import __version__
from aioengine.cli import build_parser, main
from aioengine.commands import options
from aioengine.config import EngineConfig
from aioengine.sampling_params import RepetitionDetectionParams, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("generate", "chat", "demo", "pull")


def aioengine(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "aioengine", *args], input=stdin, capture_output=True, text=True, cwd=ROOT, timeout=60)


def parse(*args: str) -> argparse.Namespace:
    return build_parser().parse_args(args)


def exit_status(args: list[str]) -> int | str | None:
    try:
        return main(args)
    except SystemExit as leaving:
        return leaving.code


# ---------------------------------------------------------------------------------------------------- help
def test_help_names_every_command_and_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    assert all(f"    {command}" in text for command in COMMANDS)
    assert "examples:" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([command, "--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: aioengine {command}")
    assert f"  aioengine {command}" in text.split("examples:")[1]
    assert "(default: None)" not in text


@pytest.mark.alone
def test_help_is_quick_and_loads_no_torch() -> None:
    code = "import sys, aioengine.cli; print('torch' in sys.modules, 'numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.split() == ["False", "False"]
    seconds = []
    for _ in range(3):
        before = _cpu_seconds_of_children()  # not the clock: others use the machine too
        assert aioengine("generate", "--help").returncode == 0
        seconds.append(_cpu_seconds_of_children() - before)
    assert min(seconds) < 0.3


def test_a_command_puts_no_other_commands_options_together() -> None:
    code = "import sys; from aioengine.cli import build_parser; build_parser('generate'); print('aioengine_bench' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
    assert vars(build_parser("generate").parse_args(["generate", "hi"])).keys() == vars(parse("generate", "hi")).keys()
    assert main(["bench", "diff", "no-such-file", "nor-this"]) != 0


def test_a_word_that_is_no_command_is_answered_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generat"])
    assert "'generate', 'chat', 'serve', 'demo', 'top', 'replay', 'bench'" in capsys.readouterr().err


def _cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--version"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out == f"aioengine {__version__}\n"


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- options
def test_every_engine_setting_has_an_option() -> None:
    args = vars(
        parse(
            *("generate", "hi", "--model", "m", "--tokenizer", "t", "--dtype", "bfloat16", "--device", "cpu", "--max-model-len", "64"),
            *("--max-num-seqs", "3", "--max-num-batched-tokens", "7", "--no-enable-chunked-prefill", "--long-prefill-token-threshold", "5"),
            *("--scheduling-policy", "priority", "--no-async-scheduling", "--block-size", "8", "--num-kv-cache-blocks", "9"),
            *("--kv-cache-memory-bytes", "1MiB", "--gpu-memory-utilization", "0.5", "--no-enable-prefix-caching"),
            *("--prefix-caching-seed", "s", "--zero-new-blocks", "--attention-backend", "torch", "--enforce-eager", "--num-threads", "2"),
            *("--cpu-affinity", "0-2,5"),
            *("--engine-seed", "4", "--check-invariants", "--weights", "dense", "--kv-cache-dtype", "float16"),
            *("--logprobs-mode", "raw_logits", "--logits-processors", "a:b", "--logits-processors", "c:d"),
            *("--lora", "sql=a/b=c", "--lora", "legal=d"),
            *("--num-speculative-tokens", "5", "--prompt-lookup-min", "1", "--prompt-lookup-max", "6"),
            *("--max-num-queued-reqs", "10", "--max-num-queued-tokens", "11", "--step-timeout-s", "1.5"),
            *(
                "--kv-cache-dir",
                "kv",
                "--kv-cache-dir-bytes",
                "3MiB",
                "--tensor-parallel-size",
                "2",
                "--distributed-executor-backend",
                "ray",
            ),
        )
    )
    config = options.engine_config(argparse.Namespace(**args))
    assert config == EngineConfig(
        model="m",
        tokenizer="t",
        dtype="bfloat16",
        device="cpu",
        max_model_len=64,
        max_num_seqs=3,
        max_num_batched_tokens=7,
        enable_chunked_prefill=False,
        long_prefill_token_threshold=5,
        scheduling_policy="priority",
        async_scheduling=False,
        block_size=8,
        num_kv_cache_blocks=9,
        kv_cache_memory_bytes=1 << 20,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        prefix_caching_seed="s",
        zero_new_blocks=True,
        attention_backend="torch",
        enforce_eager=True,
        num_threads=2,
        cpu_affinity=(0, 1, 2, 5),
        seed=4,
        check_invariants=True,
        weights="dense",
        kv_cache_dtype="float16",
        logprobs_mode="raw_logits",
        logits_processors=("a:b", "c:d"),
        loras=(("sql", "a/b=c"), ("legal", "d")),
        num_speculative_tokens=5,
        prompt_lookup_min=1,
        prompt_lookup_max=6,
        max_num_queued_reqs=10,
        max_num_queued_tokens=11,
        step_timeout_s=1.5,
        kv_cache_dir="kv",
        kv_cache_dir_bytes=3 << 20,
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
    )
    defaults = EngineConfig()
    unchanged = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) == getattr(defaults, f.name)]
    assert unchanged == [], "this test must give every setting a value of its own"


def test_what_is_not_given_stays_the_configs_default() -> None:
    assert options.engine_config(parse("generate", "hi")) == EngineConfig()


def test_sampling_options() -> None:
    args = parse(
        *("generate", "hi", "-n", "5", "-t", "0.5", "--top-p", "0.9", "--top-k", "3", "--min-p", "0.1", "--seed", "7"),
        *(
            "--stop",
            "a",
            "--stop",
            "b",
            "--ignore-eos",
            "--repetition-detection",
            "4x2-20",
            "--n",
            "3",
            "--min-tokens",
            "2",
            "--bad-word",
            "x",
            "--bad-word",
            "y z",
        ),
        *("--presence-penalty", "0.5", "--frequency-penalty=-0.5", "--repetition-penalty", "1.1", "--logit-bias", "7=-2.5"),
    )
    assert options.sampling_params(args) == SamplingParams(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        seed=7,
        stop=("a", "b"),
        ignore_eos=True,
        repetition_detection=RepetitionDetectionParams(max_pattern_size=20, min_pattern_size=2, min_count=4),
        n=3,
        min_tokens=2,
        bad_words=("x", "y z"),
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={7: -2.5},
    )
    assert options.sampling_params(parse("generate", "hi")) == SamplingParams(max_tokens=256, temperature=0.0)
    assert options.sampling_params(parse("chat")).n == 1


@pytest.mark.parametrize(("text", "sizes"), [("4x20", RepetitionDetectionParams(20, 1, 4)), ("2x3-3", RepetitionDetectionParams(3, 3, 2))])
def test_repetition_detection(text: str, sizes: RepetitionDetectionParams) -> None:
    assert options.parse_repetition_detection(text) == sizes


@pytest.mark.parametrize(
    ("text", "message"),
    [(text, "is not a count and the sizes") for text in ("", "4", "x20", "4x", "4x-3", "4x3-", "ax3")]
    + [("1x20", "min_count must be at least 2"), ("4x9-3", "must not exceed"), ("4x2000", "max_pattern_size must be")],
)
def test_bad_repetition_detection(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        options.parse_repetition_detection(text)


@pytest.mark.parametrize("text", ["", "7", "=1", "a=1", "7=b", "1.5=1"])
def test_bad_logit_biases(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a token id and its bias"):
        options.parse_logit_bias(text)


@pytest.mark.parametrize(
    ("text", "size"), [("1024", 1024), ("1k", 1000), ("1KiB", 1024), ("512MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("2gi", 2 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    assert options.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "1XB", "MiB", "inf"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size such as"):
        options.parse_size(text)


# ---------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "hi", "--no-such-option"], "--no-such-option"),
        (["generate", "hi", "--max-tok", "5"], "--max-tok"),
        (["generate"], "PROMPT"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "-"], "the prompt is empty"),
        (["generate", "hi", "--top-p", "much"], "argument --top-p: invalid float value: 'much'"),
        (["generate", "hi", "--top-p", "3"], "top_p must be in (0, 1], got 3.0"),
        (["generate", "hi", "--max-tokens", "0"], "max_tokens must be an integer >= 1"),
        (["generate", "hi", "--block-size", "0"], "block_size must be an integer >= 1, got 0"),
        (["generate", "hi", "--dtype", "float8"], "argument --dtype: invalid choice: 'float8'"),
        (["generate", "hi", "--chat", "--raw"], "not allowed with"),
        (["generate", "hi", "--raw", "--system", "x"], "--system: not allowed with argument --raw"),
        (["demo", "--max-tokens", "-1"], "max_tokens must be an integer >= 1"),
        (["pull"], "NAME"),
        (["dance"], "invalid choice: 'dance'"),
    ],
)
def test_a_usage_mistake_is_one_line_and_status_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert exit_status(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("aioengine")
    assert ": error: " in captured.err
    assert message in captured.err


@pytest.mark.model
def test_generate_on_the_native_path_imports_neither_transformers_nor_textual() -> None:
    code = (
        "import sys; from aioengine.cli import main; status = main(['generate', '--raw', '--max-tokens', '2', 'Hi']); "
        "print(); print(status, *sorted({'transformers', 'textual', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 torch"


@pytest.mark.parametrize("command", [["generate", "Hi"], ["doctor"], ["demo"]])
def test_a_dependency_that_is_not_installed_is_named_in_one_line(command: list[str]) -> None:
    code = f"import sys; sys.modules['torch'] = None; from aioengine.cli import main; sys.exit(main({command!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "aioengine: error: the package torch is not installed: install aioengine with its dependencies\n"

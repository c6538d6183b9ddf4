"""The options that several subcommands share, and how they become an `EngineConfig` and a `SamplingParams`.

The engine options and their help are derived from the fields of `EngineConfig`, so that no setting can be missing here. An
option that is not given is not in the namespace: the defaults stay where they are defined.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from aioengine.checks.settings import Setting
from aioengine.commands.structured_output_options import structured_outputs
from aioengine.config import SETTINGS, EngineConfig
from aioengine.errors import InvalidRequestError
from aioengine.sampling_params import RepetitionDetectionParams, SamplingParams

if TYPE_CHECKING:
    from aioengine.engine.publish_options import PublishOptions

# Of the engine that `aioengine top --demo` starts: small enough that chunks, full budgets and preemptions are seen.
DEMO_SETTINGS = {"num_kv_cache_blocks": 129, "max_num_batched_tokens": 128, "max_num_seqs": 16}

_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes from `1073741824`, `512MiB`, `1.5GB` or `2g`. Raises argparse.ArgumentTypeError."""
    number = text.strip().lower().removesuffix("b").rstrip("kmgti")
    unit = text.strip().lower().removesuffix("b")[len(number) :]
    try:
        return int(float(number) * _SIZE_UNITS[unit])
    except (KeyError, ValueError, OverflowError) as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 1073741824, 512MiB or 2GB") from exc


def parse_auto(text: str) -> int | str:
    """`auto`, or a whole number. Raises argparse.ArgumentTypeError."""
    try:
        return text if text == "auto" else int(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto") from exc


def parse_logit_bias(text: str) -> tuple[int, float]:
    """A token id and its bias from `1234=-2.5`. Raises argparse.ArgumentTypeError."""
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is not a token id and its bias, such as 1234=-2.5") from exc


def parse_repetition_detection(text: str) -> RepetitionDetectionParams:
    """COUNT times a pattern of MIN to MAX tokens, from `4x20` or `4x3-20`. Raises argparse.ArgumentTypeError."""
    count, _, sizes = text.partition("x")
    smallest, dash, largest = sizes.partition("-")
    if not dash:
        smallest, largest = "1", sizes
    try:
        return RepetitionDetectionParams(max_pattern_size=int(largest), min_pattern_size=int(smallest), min_count=int(count))
    except InvalidRequestError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count and the sizes of a pattern, such as 4x20 or 4x3-20") from exc


def add_model_option(parser: argparse._ActionsContainer) -> None:
    (model,) = (item for item in SETTINGS if item.name == "model")
    parser.add_argument("--model", "-m", metavar="NAME", default=model.default, help=model.summary)


def add_engine_options(parser: argparse.ArgumentParser, *, seed_option: str = "--engine-seed") -> None:
    """Every setting of `EngineConfig` but the model. Its `seed` is named `seed_option`: `--seed` is the request's."""
    group = parser.add_argument_group("engine options")
    for item in SETTINGS:
        if item.name == "model":
            continue
        flag = {"seed": seed_option, "loras": "--lora"}.get(item.name, "--" + item.name.replace("_", "-"))
        hint, keywords = _kind(item)
        text = item.summary.replace(" (default:", f"{hint} (default:", 1) if hint else item.summary
        group.add_argument(flag, dest=f"engine_{item.name}", default=argparse.SUPPRESS, help=text, **keywords)


def _kind(item: Setting) -> tuple[str, dict[str, Any]]:
    """What the help says of the form, and the argparse keywords, for a setting of this type."""
    if item.name.endswith("_bytes"):
        return "; takes 512MiB, 2GiB", {"type": parse_size, "metavar": "SIZE"}
    if item.name == "logits_processors":
        return "; may be repeated", {"action": "append", "metavar": "MODULE:NAME"}
    if item.name == "loras":
        return "; may be repeated", {"action": "append", "metavar": "NAME=FOLDER"}
    if item.name == "cpu_affinity":
        return "", {"metavar": "CORES"}
    return "", _plain_kind(item)


def _plain_kind(item: Setting) -> dict[str, Any]:
    if item.choices and not item.kinds:
        return {"choices": item.choices}
    if bool in item.kinds:
        return {"action": argparse.BooleanOptionalAction}
    if float in item.kinds:
        return {"type": float, "metavar": "X"}
    if int in item.kinds:
        return {"type": parse_auto if "auto" in item.choices else int, "metavar": "N"}
    return {"metavar": "DIR" if item.name.endswith("_dir") else "NAME"}


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Raises ConfigError."""
    given = {name.removeprefix("engine_"): value for name, value in vars(args).items() if name.startswith("engine_")}
    return EngineConfig(model=args.model, **given)


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int, temperature: float) -> None:
    group = parser.add_argument_group("sampling options")
    add = group.add_argument
    add("--max-tokens", "-n", type=int, metavar="N", default=max_tokens, help=f"most tokens to generate (default: {max_tokens})")
    add("--temperature", "-t", type=float, metavar="X", default=temperature, help=f"0 is greedy (default: {temperature:g})")
    add("--top-p", type=float, metavar="X", default=1.0, help="keep the most likely tokens that add up to X (default: 1, all)")
    add("--top-k", type=int, metavar="N", default=0, help="keep the N most likely tokens (default: 0, all)")
    add("--min-p", type=float, metavar="X", default=0.0, help="drop tokens less likely than X times the most likely (default: 0)")
    add("--presence-penalty", type=float, metavar="X", default=0.0, help="make tokens of the output less likely, -2 to 2 (default: 0)")
    add("--frequency-penalty", type=float, metavar="X", default=0.0, help="the same for each time they came (default: 0)")
    add("--repetition-penalty", type=float, metavar="X", default=1.0, help="divide logits of tokens that were seen (default: 1, off)")
    add(
        "--logit-bias",
        action="append",
        type=parse_logit_bias,
        metavar="ID=BIAS",
        default=[],
        help="add BIAS to a token's logit; may be repeated",
    )
    add("--bad-word", action="append", metavar="TEXT", default=[], help="never generate TEXT; may be repeated")
    add("--seed", type=int, metavar="N", help="same seed, same output, whatever else runs (default: a fresh one)")
    add("--stop", action="append", metavar="TEXT", default=[], help="end the output before TEXT; may be repeated")
    add("--min-tokens", type=int, metavar="N", default=0, help="do not end before N tokens (default: 0)")
    add("--ignore-eos", action="store_true", help="go on after the model's end-of-sequence token")
    add(
        "--repetition-detection",
        type=parse_repetition_detection,
        metavar="COUNTx[MIN-]MAX",
        help="end the output when a pattern of MIN to MAX tokens has come COUNT times in a row, such as 4x20 (default: no)",
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Raises InvalidRequestError."""
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
        n=getattr(args, "n", 1),  # a conversation goes on from one answer
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        repetition_penalty=args.repetition_penalty,
        logit_bias=dict(args.logit_bias),
        bad_words=tuple(args.bad_word),
        structured_outputs=structured_outputs(args),
        repetition_detection=args.repetition_detection,
    )


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """What every subcommand that starts an engine takes."""
    group = parser.add_argument_group("what others can see")
    add = group.add_argument
    add("--record", metavar="FILE", help="write every step of the engine to FILE, as JSON lines")
    add("--events", metavar="ADDRESS", help="publish every step for `aioengine top`: at a Unix socket's path, tcp:HOST:PORT, or auto")
    add("--events-token", metavar="TOKEN", help="what a viewer over TCP must know (default: AIOENGINE_EVENTS_TOKEN)")
    add("--allow-events-control", action="store_true", help="let viewers pause the engine, abort requests and submit prompts")
    add("--events-text", action="store_true", help="publish and record prompts and outputs, not only their lengths")
    add_log_option(parser)


def publish_options(args: argparse.Namespace) -> PublishOptions:
    """Raises ConfigError for an option that would do nothing."""
    from aioengine.engine.publish_options import PublishOptions
    from aioengine.errors import ConfigError

    if args.events is None and (args.events_token is not None or args.allow_events_control):
        raise ConfigError(f"{'--allow-events-control' if args.allow_events_control else '--events-token'} needs --events")
    if args.events is None and args.record is None and args.events_text:
        raise ConfigError("--events-text needs --events or --record")

    return PublishOptions(
        record=args.record,
        events=args.events,
        events_token=events_token(args.events_token) if args.events is not None else None,
        allow_events_control=args.allow_events_control,
        publish_text=args.events_text,
    )


def events_token(given: str | None) -> str | None:
    """A token from the command line, which other users of the machine can read, or from the environment."""
    return given if given is not None else os.environ.get("AIOENGINE_EVENTS_TOKEN") or None


def add_log_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="warning",
        help="what to log to stderr (default: warning)",
    )

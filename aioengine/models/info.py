"""From a model's name to its files, and the facts that its small files state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioengine.checkpoint.files import ModelFiles
from aioengine.checkpoint.gguf import GGUFFile
from aioengine.checkpoint.hub import find_files, pull_files
from aioengine.checkpoint.json_file import read_json
from aioengine.checkpoint.quantization import read_quantization
from aioengine.checkpoint.safetensors import stored_dtype
from aioengine.errors import ModelError
from aioengine.models.config import DecoderConfig, contradictions, refuse_unsupported
from aioengine.models.registry import BUILT_IN, architecture_names, architecture_of, find_model_class
from aioengine.printable import get_logger
from aioengine.resolved_config import ModelInfo

if TYPE_CHECKING:
    from aioengine.checkpoint.tokenizer import Tokenizer
    from aioengine.models.base import CausalLM

logger = get_logger(__name__)

_DTYPES = ("float32", "bfloat16", "float16")


def resolve_model(name: str, *, progress: bool = True, allow_download: bool = True) -> ModelFiles:
    """Find a model's files; fetch and convert them first if they are not here yet (blocking, possibly minutes).

    Raises ModelError, saying what was tried, for an unknown name, a failed or forbidden download, a broken file, and a model
    that no family here can serve: that before its weights are fetched.
    """
    return find_files(name, check=check_config, progress=progress, allow_download=allow_download)


def pull(name: str, *, progress: bool = True) -> ModelFiles:
    """`resolve_model` for its effect. Checks a built-in model's file again and fetches it anew if it was damaged."""
    return pull_files(name, check=check_config, progress=progress)


def check_config(folder: Path) -> tuple[str, DecoderConfig]:
    """The architecture and the shape that config.json states. Raises ModelError naming the key that cannot be served."""
    raw = read_json(folder / "config.json")
    try:
        refuse_unsupported(raw)
        architecture = architecture_of(raw)
        return architecture, find_model_class(architecture).read_config(raw)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error


def read_model_info(files: ModelFiles, *, tokenizer: Tokenizer | None = None) -> ModelInfo:
    """The model's facts, from config.json and generation_config.json, and the ends of text that its tokenizer knows.

    Raises ModelError for a missing or broken config.json and for an architecture or a quantization that is not supported.
    """
    architecture, config = check_config(files.folder)
    raw = read_json(files.folder / "config.json")
    for line in _worth_knowing(raw, architecture, config, tokenizer):
        logger.warning("%s: %s", files.folder, line)
    generation_path = files.folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    windows = config.layer_windows
    bos = [_token_ids(source, "bos_token_id", files.folder, config.vocab_size) for source in (generation, raw)]
    return ModelInfo(
        name=files.name,
        path=str(files.folder),
        architecture=architecture,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=_natural_dtype(raw, files),
        eos_token_ids=_eos_token_ids(raw, generation, find_model_class(architecture), files, tokenizer, config.vocab_size),
        bos_token_id=min(bos[0] or bos[1], default=None),
        sliding_window=windows[0] if len(set(windows)) == 1 else None,
        layer_windows=windows if len(set(windows)) > 1 else (),
        is_quantized=_is_quantized(raw, files),
    )


def _worth_knowing(raw: Mapping[str, Any], architecture: str, config: DecoderConfig, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Where the files contradict each other, a line that says what is taken."""
    for contradiction in contradictions(raw):
        yield f"config.json: {contradiction}"
    names = architecture_names(raw)
    if architecture not in names and any(name in BUILT_IN for name in names):
        yield f"config.json: architectures says {', '.join(names)}, model_type {raw.get('model_type')}: taken as {architecture}"
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        yield (
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size} (vocab_size): "
            "a prompt with one of the others is refused"
        )


def _is_quantized(raw: Mapping[str, Any], files: ModelFiles) -> bool:
    """Whether matrices stay in few bits. Those that are read as plain numbers do not count."""
    if files.format == "gguf":
        return any(GGUFFile(path).is_quantized for path in files.weights)
    quantization = read_quantization(raw)
    return quantization is not None and quantization.packs


def _natural_dtype(raw: Mapping[str, Any], files: ModelFiles) -> str:
    """`dtype`, else `torch_dtype`, else that of the weights."""
    stated = raw.get("dtype") or raw.get("torch_dtype")
    if stated is None and files.format == "safetensors":
        stated = stored_dtype(files.weights)
    name = str(stated or "float32").removeprefix("torch.")
    return name if name in _DTYPES else "float32"


def _eos_token_ids(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any],
    family: type[CausalLM],
    files: ModelFiles,
    tokenizer: Tokenizer | None,
    vocab_size: int,
) -> frozenset[int]:
    """Every id that some file calls the end of a text or of a turn: to stop too late costs the user more than too early."""
    stated = _token_ids(raw, "eos_token_id", files.folder, vocab_size) | _token_ids(generation, "eos_token_id", files.folder, vocab_size)
    if tokenizer is not None:
        stated |= {token_id for token_id in tokenizer.end_token_ids if token_id < vocab_size}
    if not stated and "eos_token_id" not in raw and family.default_eos_token_id is not None:
        return frozenset({family.default_eos_token_id})
    return stated


def _token_ids(stated: Mapping[str, Any], key: str, folder: Path, vocab_size: int) -> frozenset[int]:
    """A token id, a list of them or null. Those that the model does not have are dropped: no such token can come."""
    value = stated.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelError(f"{folder}: {key} must be a token id or a list of them, got {value!r:.200}")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        logger.warning("%s: %s %s is not in the vocabulary of %d ids: ignored", folder, key, str(outside[:3])[1:-1], vocab_size)
    return frozenset(ids) - frozenset(outside)

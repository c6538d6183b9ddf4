"""GGUF files from anybody: whatever is in the header, the outcome is a model or a ModelError, in bounded time and memory.

The fields with a meaning are edited one by one, with the message checked; hypothesis flips, cuts and splices the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType
from hypothesis import given

from aioengine.checkpoint.convert import convert_gguf
from aioengine.checkpoint.gguf import GGUFFile, read_vector, split_files
from aioengine.checkpoint.gguf_header import read_header
from aioengine.errors import ModelError
from tests.checkpoint.test_gguf import write_gguf as write_whole_gguf
from tests.models.support import cases, random_model
from tests.models.untrusted import FUZZ, MODES, U64, Weights, damages, load, model_or_error, refused, write_config

F32, Q4_1 = int(GGMLQuantizationType.F32), int(GGMLQuantizationType.Q4_1)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def tensor(name: str = "output_norm.weight", dims: tuple[int, ...] = (8,), kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ARCHITECTURE = pair("general.architecture", 8, text("llama"))


def raw_gguf(
    *entries: bytes, infos: tuple[bytes, ...] = (), num_keys: int | None = None, num_tensors: int | None = None, data: int = 256
) -> bytes:
    head = struct.pack(
        "<4sIQQ", b"GGUF", 3, len(infos) if num_tensors is None else num_tensors, len(entries) if num_keys is None else num_keys
    )
    body = head + b"".join(entries) + b"".join(infos)
    return body + bytes(-len(body) % 32 + data)


DAMAGED_HEADERS: dict[str, tuple[bytes, str]] = {
    "tensor count": (raw_gguf(ARCHITECTURE, num_tensors=U64), f"{U64} tensors .* the limit is 65536"),
    "tensor count past the end": (raw_gguf(ARCHITECTURE, num_tensors=60000), "60000 tensors take at least 1920000 bytes"),
    "key count": (raw_gguf(ARCHITECTURE, num_keys=U64), f"{U64} metadata keys .* the limit is 65536"),
    "key count past the end": (raw_gguf(ARCHITECTURE, num_keys=60000), "60000 metadata keys take at least"),
    "key length": (raw_gguf(struct.pack("<Q", U64) + b"x"), f"{U64} bytes of a metadata key .* the limit is 4096"),
    "key twice": (raw_gguf(ARCHITECTURE, ARCHITECTURE), "'general.architecture' appears twice"),
    "string length": (raw_gguf(pair("a", 8, struct.pack("<Q", 1 << 40))), f"{1 << 40} bytes of a value .* the limit is"),
    "string past the end": (raw_gguf(pair("a", 8, struct.pack("<Q", 1 << 20))), f"{1 << 20} bytes of a value take"),
    "no UTF-8": (raw_gguf(pair("a", 8, text(b"\xff\xfe"))), "is not UTF-8"),
    "value type": (raw_gguf(pair("a", 99, b"")), "unknown value type 99"),
    "array count": (raw_gguf(pair("a", 9, struct.pack("<IQ", 4, U64))), f"{U64} array items .* the limit is"),
    "array past the end": (raw_gguf(pair("a", 9, struct.pack("<IQ", 10, 1 << 20))), f"{1 << 20} array items take at least {8 << 20} bytes"),
    "array of strings past the end": (raw_gguf(pair("a", 9, struct.pack("<IQQ", 8, 3, 1 << 62))), "is truncated"),
    "array of arrays": (raw_gguf(pair("a", 9, struct.pack("<IQIQ", 9, 1, 9, 1))), "an array of arrays"),
    "array of nothing known": (raw_gguf(pair("a", 9, struct.pack("<IQ", 77, 1))), "unknown value type 77"),
    "no architecture": (raw_gguf(pair("a", 0, b"\1")), "does not name its architecture"),
    "architecture is a number": (raw_gguf(pair("general.architecture", 0, b"\1")), "does not name its architecture"),
    "alignment 0": (raw_gguf(ARCHITECTURE, pair("general.alignment", 4, bytes(4))), "general.alignment must be a multiple of 8, got 0"),
    "alignment 1": (raw_gguf(ARCHITECTURE, pair("general.alignment", 0, b"\1")), "general.alignment must be a multiple of 8, got 1"),
    "alignment text": (raw_gguf(ARCHITECTURE, pair("general.alignment", 8, text("x"))), "general.alignment must be"),
    "alignment huge": (
        raw_gguf(ARCHITECTURE, pair("general.alignment", 10, struct.pack("<Q", 1 << 60)), infos=(tensor(),)),
        "is truncated",
    ),
    "no dimension": (raw_gguf(ARCHITECTURE, infos=(tensor(dims=()),)), "has 0 dimensions"),
    "five dimensions": (raw_gguf(ARCHITECTURE, infos=(tensor(dims=(1, 1, 1, 1, 1)),)), "has 5 dimensions"),
    "empty dimension": (raw_gguf(ARCHITECTURE, infos=(tensor(dims=(8, 0)),)), r"has the empty shape \[0, 8\]"),
    "product overflows 64 bits": (raw_gguf(ARCHITECTURE, infos=(tensor(dims=(1 << 32, 1 << 32, 4)),)), "is truncated: tensor"),
    "bytes overflow 64 bits": (raw_gguf(ARCHITECTURE, infos=(tensor(dims=(U64,)),)), "is truncated: tensor"),
    "unknown tensor type": (raw_gguf(ARCHITECTURE, infos=(tensor(kind=4444),)), "has the unknown type 4444"),
    "half a block": (raw_gguf(ARCHITECTURE, infos=(tensor(dims=(33, 2), kind=Q4_1),)), "has rows of 33, not a multiple"),
    "tensor past the end": (raw_gguf(ARCHITECTURE, infos=(tensor(dims=(65,)),)), "ends at byte .* the file has"),
    "offset past the end": (raw_gguf(ARCHITECTURE, infos=(tensor(offset=1 << 20),)), "ends at byte"),
    "offset overflows": (raw_gguf(ARCHITECTURE, infos=(tensor(offset=U64 - 31),)), "ends at byte"),
    "offset unaligned": (raw_gguf(ARCHITECTURE, infos=(tensor(offset=4),)), "has the offset 4, not a multiple of 32"),
    "overlap": (
        raw_gguf(ARCHITECTURE, infos=(tensor(dims=(16,)), tensor("b.weight", offset=32))),
        "'b.weight' starts at byte .* within 'output_norm",
    ),
    "the same bytes twice": (raw_gguf(ARCHITECTURE, infos=(tensor(), tensor("b.weight"))), "within 'output_norm.weight'"),
    "name twice": (raw_gguf(ARCHITECTURE, infos=(tensor(), tensor(offset=32))), "'output_norm.weight' appears twice"),
    "name length": (raw_gguf(ARCHITECTURE, infos=(struct.pack("<Q", U64),)), f"{U64} bytes of a tensor's name|take at least"),
    "version": (struct.pack("<4sIQQ", b"GGUF", 1 << 24, 0, 0), "GGUF version 16777216 is not supported"),
    "big-endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "is not supported"),
}


@pytest.mark.parametrize("what", DAMAGED_HEADERS)
def test_a_wrong_field_of_a_gguf_header_is_named(what: str, tmp_path: Path) -> None:
    content, message = DAMAGED_HEADERS[what]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with refused(path, message):
        GGUFFile(path)


def test_a_well_formed_header_made_by_hand_is_read(tmp_path: Path) -> None:
    """Else the table above would prove nothing."""
    path = tmp_path / "good.gguf"
    many = pair("x.strings", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b"))
    path.write_bytes(raw_gguf(ARCHITECTURE, many, infos=(tensor(), tensor("b.weight", dims=(32, 2), kind=Q4_1, offset=32))))
    header = read_header(path)
    assert [(info.name, info.shape, info.num_bytes) for info in header.tensors] == [
        ("output_norm.weight", (8,), 32),
        ("b.weight", (2, 32), 40),
    ]


def test_a_header_of_a_quarter_of_a_million_strings_is_read_in_bounded_time(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    count = 1 << 18  # a large vocabulary
    path.write_bytes(raw_gguf(pair("a", 9, struct.pack("<IQ", 8, count) + bytes(8 * count)), ARCHITECTURE))
    assert model_or_error(lambda: GGUFFile(path)) is None
    path.write_bytes(raw_gguf(pair("a", 9, struct.pack("<IQ", 0, count) + bytes(count)), ARCHITECTURE))
    assert model_or_error(lambda: GGUFFile(path)) is None


@pytest.mark.parametrize("name", ["m-00000-of-00002.gguf", "m-00001-of-00000.gguf", "m-00003-of-00002.gguf"])
def test_numbers_of_split_files_that_make_no_sense(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="names itself file"):
        split_files(tmp_path / name)


@pytest.mark.parametrize("heads", [-1, 3, 1 << 30])
def test_head_counts_that_do_not_divide_the_rows(heads: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    count = pair("llama.attention.head_count", 5, struct.pack("<i", heads))
    path.write_bytes(raw_gguf(ARCHITECTURE, count, infos=(tensor("blk.0.attn_q.weight", dims=(8, 4)),)))
    with pytest.raises(ModelError, match=r"head_count must not be negative, got -1|4 rows, which are not \d+ heads"):
        list(GGUFFile(path).tensors())


@pytest.mark.parametrize("dims", [(8, 2), (1 << 13,)])
def test_rotary_factors_of_another_shape(dims: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_gguf(ARCHITECTURE, infos=(tensor("rope_freqs.weight", dims=dims),), data=4 << 13))
    file = GGUFFile(path)
    with pytest.raises(ModelError, match=r"rope_freqs.weight' must be one row of at most 4096"):
        read_vector(file, file.header.tensors[0], max_size=4096)


# ---------------------------------------------------------------------------------------------------- any damage
@pytest.mark.parametrize("weights", MODES)
@given(damage=damages())
@FUZZ
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_damaged_gguf_loads_or_says_why(
    damage: Callable[[bytes], bytes], weights: Weights, gguf_folder: Path, tmp_path_factory: Any
) -> None:
    folder = gguf_folder.with_name("damaged")
    folder.mkdir(exist_ok=True)
    write_config(folder)
    (folder / "m.gguf").write_bytes(damage((gguf_folder / "m.gguf").read_bytes()))
    model_or_error(lambda: load(folder, weights))


@pytest.fixture(scope="module")
def convertible(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A whole model, and where its header ends: everything that a conversion reads is before that."""
    path = write_whole_gguf(random_model(cases()["llama"]), tmp_path_factory.mktemp("whole") / "m.gguf", "llama")
    return path.read_bytes(), min(info.start for info in read_header(path).tensors)


@given(damage=damages())
@FUZZ
def test_a_damaged_gguf_is_converted_or_says_why(
    damage: Callable[[bytes], bytes], convertible: tuple[bytes, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Vocabulary, special tokens and every numeric key."""
    content, header_end = convertible
    folder = tmp_path_factory.mktemp("damaged")
    path = folder / "m.gguf"
    path.write_bytes(damage(content[:header_end]) + content[header_end:])
    model_or_error(lambda: convert_gguf(path, folder / "out", files=(path,)))

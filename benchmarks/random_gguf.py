"""Writes a Llama of random weights as GGUF, so that speed can be measured on a shape whose checkpoint is not at hand.

    python benchmarks/random_gguf.py /tmp/llama-1b.gguf --format q4_k_m
    aioengine bench latency --model /tmp/llama-1b.gguf --batch-size 1 --input-len 32 --output-len 64

The blocks are random bytes, with scales that give weights of a standard deviation of about 0.02: the package `gguf` cannot
quantize to the K formats, and a product takes the same time whatever it multiplies. What such a model says means nothing.
Its tokens are the bytes and as many made-up words as are missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np

Format = Literal["q4_k_m", "q4_1", "q4_0"]
Blocks = np.ndarray[Any, np.dtype[np.uint8]]
_DEVIATION = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """The defaults are those of Llama 3.2 1B: 1.24e9 weights, the head tied to the embedding."""

    hidden: int = 2048
    intermediate: int = 8192
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 128256
    context: int = 4096
    rope_theta: float = 500000.0


# By format: where its float16 scales are in a block, and their values for weights around 0 with a deviation of 1. Quants and
# small scales are evenly distributed bits, so these follow from the bits' means and squares.
_SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q4_0": ((0, 1 / 4.64),),
    "Q4_1": ((0, 1 / 4.61), (2, -7.5 / 4.61)),
    "Q4_K": ((0, 1 / 258), (2, 7.5 / 258)),
    "Q6_K": ((208, 1 / 1366),),
}


def kind_of(format_: Format, name: str, layer: int, layers: int) -> gguf.GGMLQuantizationType:
    """The format of a matrix. Of Q4_K_M as llama.cpp chooses: the values and what leaves the MLP have more bits in half of the layers."""
    if format_ != "q4_k_m":
        return gguf.GGMLQuantizationType[format_.upper()]
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    is_fine = name == "token_embd" or (name in ("attn_v", "ffn_down") and more)
    return gguf.GGMLQuantizationType.Q6_K if is_fine else gguf.GGMLQuantizationType.Q4_K


def random_blocks(
    kind: gguf.GGMLQuantizationType, rows: int, columns: int, rng: np.random.Generator
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """[rows, bytes of a row]"""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    if columns % size:
        raise SystemExit(f"a row of {columns} is no whole number of {kind.name} blocks, which have {size} weights")
    blocks = rng.integers(0, 256, (rows, columns // size, num_bytes), dtype=np.uint8)
    for offset, scale in _SCALES[kind.name]:
        blocks[..., offset : offset + 2] = np.array([scale * _DEVIATION], dtype=np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def matrices(shape: Shape) -> list[tuple[str, int, int]]:
    """(name, rows, columns) of those of a layer."""
    head = shape.hidden // shape.heads
    return [
        ("attn_q", shape.hidden, shape.hidden),
        ("attn_k", shape.kv_heads * head, shape.hidden),
        ("attn_v", shape.kv_heads * head, shape.hidden),
        ("attn_output", shape.hidden, shape.hidden),
        ("ffn_gate", shape.intermediate, shape.hidden),
        ("ffn_up", shape.intermediate, shape.hidden),
        ("ffn_down", shape.hidden, shape.intermediate),
    ]


def write(path: Path, format_: Format, shape: Shape, *, seed: int = 0) -> None:
    """Write the file. Raises OSError."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    _write_facts(writer, shape)
    for name in ("output_norm", *(f"blk.{layer}.{norm}" for layer in range(shape.layers) for norm in ("attn_norm", "ffn_norm"))):
        writer.add_tensor(f"{name}.weight", np.ones(shape.hidden, dtype=np.float32))
    kind = kind_of(format_, "token_embd", 0, shape.layers)
    writer.add_tensor("token_embd.weight", random_blocks(kind, shape.vocab, shape.hidden, rng), raw_dtype=kind)
    for layer in range(shape.layers):
        for name, rows, columns in matrices(shape):
            kind = kind_of(format_, name, layer, shape.layers)
            writer.add_tensor(f"blk.{layer}.{name}.weight", random_blocks(kind, rows, columns, rng), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_facts(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_vocab_size(shape.vocab)
    tokens = vocabulary(shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL])
    writer.add_array("tokenizer.ggml.merges", [f"{tokens[0]} {tokens[1]}"])
    writer.add_eos_token_id(len(tokens) - 1)


def vocabulary(size: int) -> list[str]:
    """The 256 bytes in the letters of byte-level BPE, the one word that the merge makes, made-up words, and an end of text."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(256 - len(printable))]
    if size < 258:
        raise SystemExit(f"the vocabulary needs at least 258 tokens, got {size}")
    merged = letters[0] + letters[1]
    return [*letters, merged, *(f"<word {index}>" for index in range(size - 258)), "<|end|>"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a Llama of random weights as GGUF.")
    parser.add_argument("path", type=Path, metavar="FILE")
    parser.add_argument("--format", choices=("q4_k_m", "q4_1", "q4_0"), default="q4_k_m")
    parser.add_argument("--seed", type=int, default=0)
    for name, default in (("hidden", 2048), ("intermediate", 8192), ("layers", 16), ("heads", 32), ("kv_heads", 8), ("vocab", 128256)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N", help=f"default {default}")
    args = parser.parse_args(arguments)
    shape = Shape(args.hidden, args.intermediate, args.layers, args.heads, args.kv_heads, args.vocab)
    write(args.path, args.format, shape, seed=args.seed)
    print(f"{args.path}: {args.path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()

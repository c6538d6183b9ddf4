"""A GGUF file that mixes block formats as Q4_K_M does, through the engine on packed weights, against transformers in float32.

The gguf package cannot quantize to K formats, so the blocks are random ones; it dequantizes them for the reference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine.models.info import resolve_model
from aioengine.models.native_decoder import NativeDecoderForCausalLM
from aioengine_kernels.cpu import FusedMatrix, PackedMatrix
from aioengine_kernels.cpu import status as native_status
from tests.models.support import reference_from_gguf
from tests.tiny_tokenizer import byte_level_tokenizer

pytestmark = pytest.mark.skipif(native_status() is not None, reason=f"no native CPU kernels: {native_status()}")

Q = GGMLQuantizationType
HIDDEN, INTERMEDIATE, LAYERS = 256, 512, 3
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
MAX_LEN = 128
# llama.cpp's Q4_K_M gives these layers' values and down projections 6 bits (its use_more_bits() for three layers).
LAYERS_WITH_MORE_BITS = (0, 2)
# Standard deviations: scores that do not saturate the softmax, a residual stream to which every layer adds much, and logits of
# some 8 units, so that the best two are seldom close.
LAYER_STD, EMBEDDING_STD, HEAD_STD = 0.0625, 0.4, 0.5
# Of the weights made of random bits, where all scales of the blocks are 1: 6-bit scales and minima around 4-bit numbers, and
# 8-bit scales around 6-bit ones.
UNIT_STD = {Q.Q4_K: 258.0, Q.Q6_K: 1366.0}

NUM_TOKENS = 16
PROMPTS = [
    "The quick brown fox",
    "a",
    "Mixed formats: every matrix in its own, from the first layer to the last.",
    "0123456789" * 4,
    "naïve café, ½ price",
    "def f(x):\n    return x",
]
# Of log-probabilities, whose standard deviation is some 8, from those of float32, on average and at most. Exact weights round
# activations to 16 bits, fast ones to 8.
TOLERANCE = {"exact": (2e-3, 1e-2), "fast": (0.3, 2.0)}
# Between the two best logits: ten times what exact weights may be off, so that rounding cannot decide between two tokens.
LEAST_GAP = 0.1
# A packed block of K quants keeps its scales multiplied out, in float32; float16 weights would take three times the stored bytes.
MOST_BYTES = 1.6


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int, *, std: float, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """[rows, bytes_per_row]: random numbers, 6-bit and 8-bit scales; the blocks' own scales such that the weights have that std."""
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, columns // block_size, block_bytes), dtype=np.uint8)
    scale = rng.uniform(0.7, 1.3, blocks.shape[:2]) * std / UNIT_STD[kind]
    # Q4_K: scale * s * q - minimum * m with q around 7.5, so that the weights are around 0. Q6_K: scale * s * (q - 32).
    stored = {0: scale, 2: scale * 7.5} if kind == Q.Q4_K else {208: scale * rng.choice([-1, 1], scale.shape)}
    for offset, value in stored.items():
        blocks[..., offset : offset + 2] = value.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def formats(vocab_size: int, *, tied: bool) -> Iterator[tuple[str, GGMLQuantizationType, tuple[int, int], float]]:
    """Name, format, shape and standard deviation of every matrix."""
    yield "token_embd.weight", Q.Q6_K if tied else Q.Q4_K, (vocab_size, HIDDEN), HEAD_STD if tied else EMBEDDING_STD
    if not tied:
        yield "output.weight", Q.Q6_K, (vocab_size, HIDDEN), HEAD_STD
    for i in range(LAYERS):
        better = Q.Q6_K if i in LAYERS_WITH_MORE_BITS else Q.Q4_K
        yield f"blk.{i}.attn_q.weight", Q.Q4_K, (HEADS * HEAD_DIM, HIDDEN), LAYER_STD
        yield f"blk.{i}.attn_k.weight", Q.Q4_K, (KV_HEADS * HEAD_DIM, HIDDEN), LAYER_STD
        yield f"blk.{i}.attn_v.weight", better, (KV_HEADS * HEAD_DIM, HIDDEN), LAYER_STD
        yield f"blk.{i}.attn_output.weight", Q.Q4_K, (HIDDEN, HEADS * HEAD_DIM), LAYER_STD
        yield f"blk.{i}.ffn_gate.weight", Q.Q4_K, (INTERMEDIATE, HIDDEN), LAYER_STD
        yield f"blk.{i}.ffn_up.weight", Q.Q4_K, (INTERMEDIATE, HIDDEN), LAYER_STD
        yield f"blk.{i}.ffn_down.weight", better, (HIDDEN, INTERMEDIATE), LAYER_STD


def write_model(path: Path, *, tied: bool) -> None:
    """The rows of queries and keys are random, so they are in llama.cpp's order as well as in any other."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(MAX_LEN)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    vocab = byte_level_tokenizer(["<eos>", "<bos>"]).get_vocab()
    tokens = [*sorted(vocab, key=vocab.__getitem__), "th"]  # not a multiple of the kernels' 16 rows
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    rng = np.random.default_rng(0)
    for name, kind, (rows, columns), std in formats(len(tokens), tied=tied):
        writer.add_tensor(name, random_blocks(kind, rows, columns, std=std, rng=rng), raw_dtype=kind)
    for name in ("output_norm", *(f"blk.{i}.{norm}" for i in range(LAYERS) for norm in ("attn_norm", "ffn_norm"))):
        writer.add_tensor(f"{name}.weight", rng.uniform(0.8, 1.2, HIDDEN).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass(frozen=True)
class Loaded:
    """What the worker has in memory."""

    layers: list[dict[str, list[str]]]  # the formats of the parts of each matrix of a layer
    embedding: str
    head: str
    num_bytes: int


def look_at(worker: Any) -> Loaded:
    """Runs in the worker's thread."""
    model = worker._model
    assert isinstance(model, NativeDecoderForCausalLM)
    assert not list(model.parameters())
    assert model._embedding is not None
    assert model._head is not None

    def parts(matrix: PackedMatrix | FusedMatrix) -> tuple[PackedMatrix, ...]:
        return matrix.parts if isinstance(matrix, FusedMatrix) else (matrix,)

    layers = [{name: parts(getattr(layer, name)) for name in ("qkv", "output", "gate_up", "down")} for layer in model._layers]
    matrices = [part for layer in layers for found in layer.values() for part in found] + [model._embedding]
    if model._head is not model._embedding:
        matrices.append(model._head)
    return Loaded(
        layers=[{name: [part.kind for part in found] for name, found in layer.items()} for layer in layers],
        embedding=model._embedding.kind,
        head=model._head.kind,
        num_bytes=sum(matrix.nbytes for matrix in matrices),
    )


@dataclass(frozen=True)
class Run:
    outputs: list[RequestOutput]
    is_quantized: bool
    loaded: Loaded


async def run(path: Path, weights: Any) -> Run:
    """All prompts in one batch."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=20, prompt_logprobs=20)
    async with AsyncEngine(str(path), weights=weights, max_num_seqs=len(PROMPTS), check_invariants=True) as engine:
        outputs = await engine.generate_batch(PROMPTS, params, progress=False)
        assert engine._life.executor is not None
        (loaded,) = await asyncio.wrap_future(engine._life.executor.collective_rpc(look_at))
        return Run(outputs, engine.model_info.is_quantized, loaded)


@dataclass(frozen=True)
class Case:
    tied: bool
    stored_bytes: int  # of all matrices, in the file
    reference: transformers.PreTrainedModel  # float32
    exact: Run
    fast: Run


@pytest.fixture(scope="module", params=["tied", "untied"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder, tied = tmp_path_factory.mktemp("mixed"), request.param == "tied"
    path = folder / "mixed.Q4_K_M.gguf"
    write_model(path, tied=tied)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIOENGINE_CACHE", str(folder / "cache"))
        reference = reference_from_gguf(resolve_model(str(path)))
        exact, fast = (asyncio.run(run(path, weights)) for weights in ("exact", "fast"))
    stored = [tensor for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) > 1]
    assert {tensor.tensor_type for tensor in stored} == {Q.Q4_K, Q.Q6_K}
    return Case(tied, sum(int(tensor.n_bytes) for tensor in stored), reference, exact, fast)


def reference_greedy(model: transformers.PreTrainedModel, prompt_token_ids: list[int]) -> tuple[list[int], float]:
    """The tokens that transformers generates, and by how much the best logit ever was above the second."""
    ids, gap = list(prompt_token_ids), float("inf")
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        best = logits.topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return ids[len(prompt_token_ids) :], gap


def test_exact_weights_give_the_tokens_of_transformers(case: Case) -> None:
    assert [output.prompt for output in case.exact.outputs] == PROMPTS
    for output in case.exact.outputs:
        expected, gap = reference_greedy(case.reference, output.prompt_token_ids)
        assert gap > LEAST_GAP, "the reference itself is nearly undecided: take another seed"
        assert output.token_ids == expected


def logprob_errors(model: transformers.PreTrainedModel, output: RequestOutput) -> list[float]:
    """For every log-probability that was reported, of the prompt and of the output, how far it is from the model's own for the
    same history."""
    with torch.inference_mode():
        expected = model(torch.tensor([output.prompt_token_ids + output.token_ids])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert len(entries) == len(output.prompt_token_ids) + len(output.token_ids) - 1
    return [
        abs(value.logprob - float(expected[position, token]))
        for position, entry in enumerate(entries)
        for token, value in cast(Any, entry).items()
    ]


@pytest.mark.parametrize("weights", ["exact", "fast"])
def test_logprobs_keep_to_float32(case: Case, weights: str) -> None:
    outputs = (case.exact if weights == "exact" else case.fast).outputs
    errors = [error for output in outputs for error in logprob_errors(case.reference, output)]
    print(f"{len(errors)} log-probabilities: {np.mean(errors):.1e} from float32 on average, {max(errors):.1e} at most")
    average, worst = TOLERANCE[weights]
    assert np.mean(errors) < average
    assert max(errors) < worst
    if weights == "fast":
        # The float16 cache of this mode alone makes 4e-3.
        assert np.mean(errors) > 10 * TOLERANCE["exact"][0], "these are not the fast weights"


def test_every_matrix_stays_in_the_format_it_is_stored_in(case: Case) -> None:
    for found in (case.exact, case.fast):
        assert found.is_quantized
        loaded = found.loaded
        assert (loaded.embedding, loaded.head) == ("Q6_K" if case.tied else "Q4_K", "Q6_K")
        mixed = {"qkv": ["Q4_K", "Q6_K"], "output": ["Q4_K"], "gate_up": ["Q4_K"], "down": ["Q6_K"]}
        plain = {"qkv": ["Q4_K"], "output": ["Q4_K"], "gate_up": ["Q4_K"], "down": ["Q4_K"]}
        assert loaded.layers == [mixed if i in LAYERS_WITH_MORE_BITS else plain for i in range(LAYERS)]
        assert case.stored_bytes <= loaded.num_bytes < MOST_BYTES * case.stored_bytes

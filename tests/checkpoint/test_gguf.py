"""GGUF: dequantization equals the reference bit for bit, names and row order are undone, broken files are named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from aioengine.checkpoint.convert import convert_gguf
from aioengine.checkpoint.dequantize import dequantize_into
from aioengine.checkpoint.files import ModelFiles
from aioengine.checkpoint.gguf import GGUFFile, split_files
from aioengine.checkpoint.gguf_header import read_header
from aioengine.errors import ModelError
from aioengine.models.info import resolve_model
from tests.models.support import VOCAB, assert_same, cases, load_ours, logits_of, random_model, reference_logits, some_tokens

Q = GGMLQuantizationType
BLOCK_FORMATS = [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS, Q.TQ1_0]
HEADS, KV_HEADS = 4, 2


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Any bytes are valid blocks, apart from scales that are NaN or infinite; those compare equal too."""
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(3)
    return rng.integers(0, 256, (rows, columns // block_size * block_bytes), dtype=np.uint8)


@pytest.mark.parametrize("kind", BLOCK_FORMATS, ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
def test_dequantization_equals_the_reference(kind: GGMLQuantizationType) -> None:
    raw = random_blocks(kind, 37, 512)
    expected = torch.from_numpy(gguf.dequantize(raw, kind))
    out = torch.full((37, 512), torch.nan)
    dequantize_into(torch.from_numpy(raw), kind, out)
    assert torch.equal(out.view(torch.int32)[~out.isnan()], expected.view(torch.int32)[~expected.isnan()])
    assert torch.equal(out.isnan(), expected.isnan())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
def test_large_tensors_go_in_chunks_and_into_slices() -> None:
    raw = random_blocks(Q.Q4_1, 3000, 512)  # more than one chunk
    expected = torch.from_numpy(gguf.dequantize(raw, Q.Q4_1))
    whole = torch.zeros(3002, 512)
    dequantize_into(torch.from_numpy(raw), Q.Q4_1, whole[1:-1])
    torch.testing.assert_close(whole[1:-1], expected, rtol=0, atol=0, equal_nan=True)
    assert not whole[0].any()
    assert not whole[-1].any()
    half = torch.zeros(3000, 512, dtype=torch.float16)
    dequantize_into(torch.from_numpy(raw), Q.Q4_1, half)
    torch.testing.assert_close(half, expected.half(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("kind", "dtype"), [(Q.F32, torch.float32), (Q.F16, torch.float16), (Q.BF16, torch.bfloat16)])
def test_plain_numbers_are_copied(kind: GGMLQuantizationType, dtype: torch.dtype) -> None:
    numbers = torch.randn(5, 24).to(dtype)
    out = torch.empty(5, 24)
    dequantize_into(numbers.view(torch.uint8), kind, out)
    assert torch.equal(out, numbers.float())


def permuted(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """What llama.cpp's converter does to the rows of queries and keys."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


_GEMMA3_NAMES = {
    **_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, architecture: str = "llama") -> str:
    names = _GEMMA3_NAMES if architecture == "gemma3" else _NAMES
    base, _, kind = name.rpartition(".")
    if base.startswith("model.layers."):
        _, _, layer, part = base.split(".", 3)
        return f"blk.{layer}.{names[part]}.{kind}"
    return f"{names[base]}.{kind}"


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    tokens = ["<unk>", "<s>", "</s>", "<|eot|>", letters[0] + letters[1], *letters][:VOCAB]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 3] + [1] * (VOCAB - 4))
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_chat_template("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")


def begin_gguf(path: Path, architecture: str, config: Any) -> gguf.GGUFWriter:
    """A file with what llama.cpp's converter says of any decoder's shape."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", config.hidden_size // config.num_attention_heads))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"])
    return writer


def write_gguf(
    model: transformers.PreTrainedModel,
    path: Path,
    architecture: str,
    *,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    leave_out: Collection[str] = (),
) -> Path:
    config: Any = model.config
    writer = begin_gguf(path, architecture, config)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer)
    if extra is not None:
        extra(writer)
    for name, parameter in model.state_dict().items():
        if name in leave_out or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        weights = parameter.numpy().copy()
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2]) if architecture == "llama" else None
        if architecture == "gemma3" and name.endswith("norm.weight"):
            weights += 1.0  # as llama.cpp's converter does
        writer.add_tensor(gguf_name(name, architecture), permuted(weights, heads) if heads else weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIOENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("case", "architecture"), [("llama", "llama"), ("llama-tied", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("qwen3-tied", "qwen3")]
)
def test_a_written_file_gives_the_logits_it_was_made_from(case: str, architecture: str, tmp_path: Path, cache: Path) -> None:
    """Conversion, names, row order, head size and tying, through `resolve_model` as a user's file goes."""
    model = random_model(cases()[case])
    files = resolve_model(str(write_gguf(model, tmp_path / "tiny.gguf", architecture)))
    assert files.folder.is_relative_to(cache)
    assert_same(logits_of(load_ours(files), some_tokens()), reference_logits(model, some_tokens()))


def test_biases_of_llama_are_reordered_too(tmp_path: Path, cache: Path) -> None:
    case = cases()["llama"]
    case.config.attention_bias = True
    model = random_model(case)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.bias)  # llama.cpp has no place for config's mlp-like output bias switch
    files = resolve_model(str(write_gguf(model, tmp_path / "tiny.gguf", "llama")))
    assert_same(logits_of(load_ours(files), some_tokens()), reference_logits(model, some_tokens()))


def test_llama3_frequency_factors_are_used(tmp_path: Path, cache: Path) -> None:
    """llama.cpp stores Llama 3's rotary scaling as a tensor of divisors; transformers' own reader drops it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = random_model(cases()["llama3-rope"])
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config)
    dim = 16
    plain = 1.0 / (500000.0 ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())

    files = resolve_model(str(write_gguf(model, tmp_path / "tiny.gguf", "llama", extra=extra)))
    assert_same(logits_of(load_ours(files), some_tokens()), reference_logits(model, some_tokens()))


def test_conversion_keeps_every_stop_id_and_the_chat_template(tmp_path: Path, cache: Path) -> None:
    from aioengine.checkpoint.tokenizer import load_tokenizer
    from aioengine.models.info import read_model_info

    files = resolve_model(str(write_gguf(random_model(cases()["llama"]), tmp_path / "tiny.gguf", "llama")))
    assert read_model_info(files).eos_token_ids == {2, 3}
    tokenizer = load_tokenizer(files.folder)
    assert tokenizer.special_token_ids == {0, 1, 2, 3}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "user: hi\n"


def test_conversion_happens_once_a_file(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(random_model(cases()["llama"]), tmp_path / "tiny.gguf", "llama")
    first = resolve_model(str(path))
    calls: list[Path] = []
    monkeypatch.setattr("aioengine.checkpoint.hub.convert_gguf", lambda path, folder, **_: calls.append(folder))
    assert resolve_model(str(path)) == first
    assert calls == []
    write_gguf(random_model(cases()["llama-tied"]), path, "llama")
    resolve_model(str(path))
    assert calls != []
    assert calls[0] != first.folder


def test_conversion_does_not_wait_for_transformers_to_be_imported(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(random_model(cases()["llama"]), tmp_path / "tiny.gguf", "llama")
    script = (
        "import sys; from aioengine.models.info import resolve_model; resolve_model(sys.argv[1]); sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=100)


def test_truncation_anywhere_is_a_model_error(tmp_path: Path) -> None:
    path = write_gguf(random_model(cases()["llama"]), tmp_path / "tiny.gguf", "llama")
    content = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    header_end = min(info.start for info in read_header(path).tensors)
    for size in [0, 3, 4, 7, 12, 23, *range(24, header_end, 97), header_end, header_end + 1000, len(content) - 40]:
        cut.write_bytes(content[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GGUFFile(cut)


def test_damage_in_the_header_is_a_model_error(tmp_path: Path) -> None:
    """Whatever byte is wrong: either a ModelError or a header that still fits the file, never another exception."""
    path = write_gguf(random_model(cases()["llama"]), tmp_path / "tiny.gguf", "llama")
    content = bytearray(path.read_bytes())
    header_end = min(info.start for info in read_header(path).tensors)
    damaged = tmp_path / "damaged.gguf"
    refused = 0
    for at in range(0, header_end, 13):
        old, content[at] = content[at], content[at] ^ 0xFF
        damaged.write_bytes(content)
        content[at] = old
        try:
            read_header(damaged)
        except ModelError:
            refused += 1
    assert refused > 20


def test_other_files_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="is not a GGUF file: it starts with b'PK"):
        read_header(path)
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
    with pytest.raises(ModelError, match="GGUF version 1 is not supported"):
        read_header(path)


def test_unsupported_architecture_and_experts_are_named(tmp_path: Path) -> None:
    model = random_model(cases()["llama"])
    path = write_gguf(model, tmp_path / "phi.gguf", "phi3")
    with pytest.raises(ModelError, match=r"'phi3' is not supported; supported: gemma3, llama, qwen2, qwen3, qwen3moe"):
        convert_gguf(path, tmp_path / "out", files=(path,))
    path = write_gguf(model, tmp_path / "moe.gguf", "qwen3", extra=lambda writer: writer.add_expert_count(8))
    with pytest.raises(ModelError, match="'qwen3 with experts' is not supported"):
        convert_gguf(path, tmp_path / "out", files=(path,))
    assert not (tmp_path / "out").exists()


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.ffn_gate_inp.weight", np.zeros((4, 64), dtype=np.float32))

    path = write_gguf(random_model(cases()["llama"]), tmp_path / "odd.gguf", "llama", extra=extra)
    files = ModelFiles(name="odd", folder=tmp_path, weights=(path,), format="gguf")
    random_model(cases()["llama"]).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_gate_inp\.weight"):
        load_ours(files)


def test_split_files_are_found_and_a_hole_is_named(tmp_path: Path) -> None:
    names = [tmp_path / f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for name in names[:2]:
        name.touch()
    with pytest.raises(ModelError, match="m-00003-of-00003"):
        split_files(names[1])
    names[2].touch()
    assert split_files(names[1]) == tuple(names)
    assert split_files(tmp_path / "plain.gguf") == (tmp_path / "plain.gguf",)


def test_packed_rows_are_reordered_like_the_dense_ones(tmp_path: Path) -> None:
    """The seam for kernels that multiply on the stored blocks."""
    dense = torch.randn(64, 64).numpy()
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_head_count(HEADS)
    writer.add_tensor("blk.0.attn_q.weight", gguf.quantize(permuted(dense, HEADS), Q.Q4_1), raw_dtype=Q.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (stored,) = GGUFFile(tmp_path / "q.gguf").tensors()
    assert stored.name == "model.layers.0.self_attn.q_proj.weight"
    packed = stored.read_packed()
    assert packed is not None
    assert packed.kind == "Q4_1"
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(dense, Q.Q4_1), Q.Q4_1))
    assert torch.equal(torch.from_numpy(gguf.dequantize(packed.data.numpy(), Q.Q4_1)), expected)
    out = torch.empty(64, 64)
    stored.read_into(out)
    assert torch.equal(out, expected)

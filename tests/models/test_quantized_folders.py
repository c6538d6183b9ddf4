"""Folders of GPTQ, AWQ, compressed-tensors, fp8 and bitsandbytes, written by those packages (quantized/make.py)."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from aioengine.attention.base import AttentionConfig
from aioengine.attention.cpu_paged import CpuPagedBackend
from aioengine.attention.torch_paged import TorchPagedBackend
from aioengine.checkpoint.files import ModelFiles
from aioengine.checkpoint.quantization import read_quantization
from aioengine.checkpoint.quantized_folder import assemble
from aioengine.checkpoint.safetensors import open_all_safetensors
from aioengine.checkpoint.stored_tensor import StoredTensor
from aioengine.errors import ModelError
from aioengine.models.fallback.model import TransformersForCausalLM
from aioengine.models.info import read_model_info, resolve_model
from aioengine.models.loader import load_model
from aioengine.models.native_decoder import NativeDecoderForCausalLM, pack_alike, packable_kind
from aioengine.models.tensor_parallel import SomeColumns, SomeRows
from aioengine_kernels.cpu import status
from aioengine_kernels.cpu.packing import gather_rows
from tests.models.support import CPU, assert_same, load_ours, logits_of, reference_logits
from tests.models.test_native_decoder import logits_of as paged_logits

FOLDERS = Path(__file__).parent / "quantized"
NAMES = sorted(path.parent.name for path in FOLDERS.glob("*/config.json"))
# How each stays in memory on the native kernels; the others become plain numbers.
KINDS = {
    "awq": {"Q4_1_F32"},
    "gptq": {"Q4_1_F32"},
    "gptq-v2": {"Q4_1_F32"},
    "gptq-sym": {"Q4_0"},
    "compressed-sym": {"Q4_0"},
    "compressed-channel": {"Q4_1", "Q4_1_F32"},  # one scale a row, in bfloat16: some minima fit float16
}
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
TOKENS = torch.arange(40) * 7 % 64
native = pytest.mark.skipif(status() is not None, reason=str(status()))


def tensors_of(folder: Path) -> dict[str, StoredTensor]:
    quantization = read_quantization(json.loads((folder / "config.json").read_text()))
    assert quantization is not None
    return {stored.name: stored for stored in assemble(open_all_safetensors([folder / "model.safetensors"]), quantization)}


def numbers(stored: StoredTensor) -> torch.Tensor:
    out = torch.empty(stored.shape)
    stored.read_into(out)
    return out


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    return {name: numbers(stored) for name, stored in tensors_of(folder).items() if not name.endswith("_proj.bias")}


def plain_folder(folder: Path, out: Path) -> ModelFiles:
    """The same model, its weights as float32."""
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    out.mkdir()
    (out / "config.json").write_text(json.dumps(raw))
    save_file(dequantized(folder), out / "model.safetensors")
    return resolve_model(str(out))


def copy(name: str, out: Path, *, config: dict[str, Any] | None = None, **stated: Any) -> Path:
    """stated: keys of quantization_config to replace; None removes one."""
    shutil.copytree(FOLDERS / name, out)
    raw = json.loads((out / "config.json").read_text())
    merged = {**raw["quantization_config"], **stated}
    raw["quantization_config"] = {key: value for key, value in merged.items() if value is not None}
    (out / "config.json").write_text(json.dumps({**raw, **(config or {})}))
    return out


def load_native(files: ModelFiles, *, fast: bool) -> tuple[NativeDecoderForCausalLM, CpuPagedBackend]:
    info = read_model_info(files)
    backend = CpuPagedBackend(AttentionConfig(info.num_heads, info.num_kv_heads, info.head_dim, 16, torch.float32, torch.float32))
    weights: Any = "fast" if fast else "exact"
    model = load_model(files, info=info, device=CPU, dtype=torch.float32, attention_backend=backend, weights=weights)
    assert isinstance(model, NativeDecoderForCausalLM)
    return model, backend


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_are_those_that_the_package_itself_reads(name: str) -> None:
    expected = json.loads((FOLDERS / name / "expected.json").read_text())
    found = tensors_of(FOLDERS / name)
    assert len(expected) == 7
    for key, digest in expected.items():
        assert hashlib.sha256(numbers(found[key]).numpy().tobytes()).hexdigest() == digest, key


@native
@pytest.mark.parametrize("name", NAMES)
def test_packed_matrices_hold_the_same_numbers_bit_for_bit_whole_and_cut(name: str) -> None:
    matrices = [stored for key, stored in tensors_of(FOLDERS / name).items() if key.endswith("_proj.weight")]
    assert {packable_kind(stored) for stored in matrices} == KINDS.get(name, {None})
    for stored in matrices:
        rows, columns = stored.shape
        cuts: list[StoredTensor] = [stored, SomeRows(stored, rows // 2, rows // 2), SomeColumns(stored, columns // 2, columns // 2)]
        for cut in cuts:
            matrix = pack_alike([cut])
            assert torch.equal(gather_rows(matrix, torch.arange(matrix.rows)), numbers(cut))
            if name in KINDS:
                assert matrix.nbytes <= 6.1 / 32 * 4 * cut.shape[0] * cut.shape[1]


@native
def test_minima_that_float16_holds_stay_in_float16(tmp_path: Path) -> None:
    folder = edited(copy("gptq", tmp_path / "m"), lambda t: t[f"{Q}.scales"].fill_(2.0**-5))
    stored = tensors_of(folder)[f"{Q}.weight"]
    assert packable_kind(stored) == "Q4_1"
    assert torch.equal(gather_rows(pack_alike([stored]), torch.arange(64)), numbers(stored))


@pytest.mark.parametrize("name", NAMES)
def test_dense_logits_equal_those_of_the_dequantized_model(name: str, tmp_path: Path) -> None:
    files = resolve_model(str(FOLDERS / name))
    plain = plain_folder(FOLDERS / name, tmp_path / "plain")
    ours = logits_of(load_ours(files), TOKENS)
    assert torch.equal(ours, logits_of(load_ours(plain), TOKENS))
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(plain.folder, dtype=torch.float32)
    assert_same(ours, reference_logits(reference, TOKENS))


@native
@pytest.mark.parametrize("name", NAMES)
def test_packed_logits_and_tokens_are_those_of_the_dequantized_model(name: str, tmp_path: Path) -> None:
    plain = plain_folder(FOLDERS / name, tmp_path / "plain")
    info = read_model_info(plain)
    backend = TorchPagedBackend(AttentionConfig(info.num_heads, info.num_kv_heads, info.head_dim, 16, torch.float32, torch.float32))
    reference = load_model(plain, info=info, device=CPU, dtype=torch.float32, attention_backend=backend)
    want = paged_logits(reference, backend, [40], vocabulary=64)
    for fast, tolerance in ((False, 1e-4), (True, 0.1)):
        got = paged_logits(*load_native(resolve_model(str(FOLDERS / name)), fast=fast), [3, 36, 1], vocabulary=64)
        assert float((got - want).norm() / want.norm()) < tolerance
        if not fast:
            assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_stay_in_few_bits_are_fast_by_default(name: str) -> None:
    assert read_model_info(resolve_model(str(FOLDERS / name))).is_quantized == (not name.startswith(("fp8", "compressed-fp8", "nf4")))


@native
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fp8", "float8 spans more"),
        ("nf4", "no table of numbers"),
        ("gptq-act-order", r"in no order of groups \(desc_act, g_idx\)"),
        ("gptq", None),
    ],
)
def test_what_becomes_plain_numbers_is_announced(name: str, reason: str | None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_native(resolve_model(str(FOLDERS / name)), fast=False)
    lines = [record.getMessage() for record in caplog.records if "in memory" in record.getMessage()]
    assert len(lines) == (reason is not None)
    if reason is not None:
        num_bytes = 36864 if name == "fp8" else 36864 // 2
        assert lines[0].startswith(f"weights of {num_bytes} bytes in the file take {36864 * 4} bytes in memory, as float32: ")
        assert re.search(reason, lines[0])


def test_a_family_without_a_class_here_runs_from_a_quantized_folder(tmp_path: Path) -> None:
    config = {"model_type": "granite", "architectures": ["GraniteForCausalLM"]}
    files = resolve_model(str(copy("gptq", tmp_path / "granite", config=config)))
    info = read_model_info(files)
    backend = TorchPagedBackend(AttentionConfig(info.num_heads, info.num_kv_heads, info.head_dim, 16, torch.float32, torch.float32))
    model = load_model(files, info=info, device=CPU, dtype=torch.float32, attention_backend=backend)
    assert isinstance(model, TransformersForCausalLM)
    loaded = dict(model.named_parameters())
    for name in (f"{Q}.weight", f"{DOWN}.weight"):
        (parameter,) = [value for key, value in loaded.items() if key.endswith(name.removeprefix("model."))]
        assert torch.equal(parameter, dequantized(FOLDERS / "gptq")[name])


def test_group_indices_left_at_zero_mean_groups_in_order(tmp_path: Path) -> None:
    folder = edited(copy("gptq", tmp_path / "m"), lambda t: t[f"{Q}.g_idx"].zero_())
    assert torch.equal(numbers(tensors_of(folder)[f"{Q}.weight"]), dequantized(FOLDERS / "gptq")[f"{Q}.weight"])


def test_a_bias_that_is_not_zero_is_no_writers_habit(tmp_path: Path) -> None:
    folder = edited(copy("gptq", tmp_path / "m"), lambda t: t[f"{Q}.bias"].fill_(1.0))
    with pytest.raises(ModelError, match=r"q_proj.bias of the checkpoint.*no bias there"):
        load_ours(resolve_model(str(folder)))


def edited(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def groups(*weights: dict[str, Any]) -> dict[str, Any]:
    return {f"group_{i}": {"targets": ["Linear"], "weights": one} for i, one in enumerate(weights)}


CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gptq, 3 bits": ("gptq", {"bits": 3}, r"'gptq' \(3 bits\) are not supported; 4 bits are; use the model that was quantized, or a GGUF"),
    "gptq, 8 bits": ("gptq", {"bits": 8}, r"'gptq' \(8 bits\)"),
    "gptq, no group size": ("gptq", {"group_size": None}, "group_size None.*-1 and multiples of 32"),
    "gptq, odd groups": ("gptq", {"group_size": 24}, "with group_size 24 are not supported; -1 and multiples of 32"),
    "gptq, marlin": ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' are not supported; gptq, gptq_v2 are"),
    "gptq, by layer": ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, r"other settings by layer \(dynamic"),
    "awq, gemv": ("awq", {"version": "GEMV"}, "version 'gemv' are not supported; gemm is"),
    "awq, no zero point": ("awq", {"zero_point": False}, "'awq' with zero_point false"),
    "awq, 8 bits": ("awq", {"bits": 8}, r"'awq' \(8 bits\)"),
    "fp8, e5m2": ("fp8", {"fmt": "e5m2"}, "'fp8' with fmt 'e5m2' are not supported; e4m3 is"),
    "fp8, a block of 0": ("fp8", {"weight_block_size": [0, 32]}, r"weight_block_size \[0, 32\]"),
    "bitsandbytes, 8 bits": ("nf4", {"load_in_4bit": False, "load_in_8bit": True}, r"'bitsandbytes' \(8 bits\).*nf4 and fp4"),
    "bitsandbytes, another table": ("nf4", {"bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type 'af4'"),
    "compressed, sparse": ("compressed-sym", {"format": "marlin-24"}, "format 'marlin-24' are not supported; pack-quantized"),
    "compressed, no groups": ("compressed-sym", {"config_groups": {}}, r"with config_groups \{\}|config_groups None"),
    "compressed, 8 bits": ("compressed-sym", {"config_groups": groups({**GROUP, "num_bits": 8})}, r"\(8 bits, type 'int'\)"),
    "compressed, of two kinds": ("compressed-sym", {"config_groups": groups(GROUP, {**GROUP, "group_size": 64})}, "2 different settings"),
    "compressed, a tensor's scale": ("compressed-sym", {"config_groups": groups({**GROUP, "strategy": "tensor"})}, "strategy 'tensor'"),
    "compressed, integers of 8 bits": ("compressed-fp8", {"config_groups": groups({**FLOAT8, "type": "int"})}, "8 bits, type 'int'"),
    "another method": ("gptq", {"quant_method": "hqq"}, r"'hqq' \(4 bits\) are not supported; supported: gptq, awq, fp8"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_quantization_that_is_not_served_is_refused_by_name(what: str, tmp_path: Path) -> None:
    name, stated, message = CONFIGS[what]
    with pytest.raises(ModelError, match=message) as failure:
        resolve_model(str(copy(name, tmp_path / "m", **stated)))
    assert len(str(failure.value).splitlines()) == 1


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def replace(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: value})


def state(**changes: Any) -> Callable[[dict[str, torch.Tensor]], object]:
    key = f"{Q}.weight.quant_state.bitsandbytes__nf4"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        changed = {**json.loads(bytes(tensors[key].tolist())), **changes}
        tensors[key] = torch.tensor(list(json.dumps(changed).encode()), dtype=torch.uint8)

    return edit


TENSORS: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, torch.Tensor]], object], str]] = {
    "gptq without scales": ("gptq", {}, drop(f"{Q}.scales"), f"lacks {Q}.scales, a part of a quantized matrix"),
    "gptq without zero points": ("gptq", {}, drop(f"{Q}.qzeros"), f"lacks {Q}.qzeros"),
    "act order without indices": ("gptq-act-order", {}, drop(f"{Q}.g_idx"), f"lacks {Q}.g_idx"),
    "groups that do not divide": (
        "gptq",
        {"group_size": 96},
        dict,
        "group_size 96 does not divide the 128 columns of model.layers.0.mlp.down_proj.weight",
    ),
    "groups of another size": (
        "gptq",
        {"group_size": 64},
        dict,
        r"down_proj.qzeros has shape \[4, 8\], quantization_config implies shape \[2, 8\]",
    ),
    "words of 3 bits": (
        "gptq",
        {},
        replace(f"{Q}.qweight", torch.zeros(6, 64, dtype=torch.int32)),
        "group_size 32 does not divide the 48 columns",
    ),
    "words that are no integers": ("gptq", {}, replace(f"{Q}.qweight", torch.zeros(8, 64)), "q_proj.qweight is stored as F32, not as I32"),
    "a group that is not there": (
        "gptq-act-order",
        {},
        lambda t: t[f"{Q}.g_idx"].fill_(2),
        r"q_proj.g_idx must name groups 0..1, got 2..2",
    ),
    "awq that is gptq": (
        "gptq",
        {"quant_method": "awq"},
        dict,
        "q.* has shape .*, quantization_config implies shape|group_size 32 does not divide",
    ),
    "none quantized": ("awq", {"quant_method": "fp8", "bits": None}, dict, "are quantized by fp8, but no tensor of the checkpoint is"),
    "compressed without scales": ("compressed-sym", {}, drop(f"{Q}.weight_scale"), f"lacks {Q}.weight_scale"),
    "compressed, of another shape": (
        "compressed-sym",
        {},
        replace(f"{Q}.weight_shape", torch.tensor([64, 63])),
        r"weight_shape is not the shape of .*weight_packed, \[64, 64\]",
    ),
    "fp8 without scales": ("fp8", {}, drop(f"{Q}.weight_scale_inv"), f"lacks {Q}.weight_scale"),
    "fp8 with other blocks": (
        "fp8",
        {"weight_block_size": [16, 32]},
        dict,
        r"weight_scale_inv has shape \[2, 4\], the scales of .* \[64, 128\] have \[4, 4\]",
    ),
    "nf4 without scales": ("nf4", {}, drop(f"{Q}.weight.absmax"), f"lacks {Q}.weight.absmax"),
    "nf4 that is no JSON": (
        "nf4",
        {},
        replace(f"{Q}.weight.quant_state.bitsandbytes__nf4", torch.zeros(3, dtype=torch.uint8)),
        "bitsandbytes__nf4 is not what bitsandbytes writes",
    ),
    "nf4 of a huge shape": ("nf4", {}, state(shape=[1 << 24, 1 << 24]), r"absmax has shape \[64\], quantization_config implies"),
    "nf4 with blocks of 0": ("nf4", {}, state(blocksize=0), "not what bitsandbytes writes: ValueError: 0 is no size"),
}


@pytest.mark.parametrize("what", TENSORS)
def test_a_quantized_folder_whose_tensors_contradict_its_config_gets_one_line(what: str, tmp_path: Path) -> None:
    name, stated, edit, message = TENSORS[what]
    folder = edited(copy(name, tmp_path / "m", **stated), edit)
    with pytest.raises(ModelError, match=message) as failure:
        load_ours(resolve_model(str(folder)))
    assert len(str(failure.value).splitlines()) == 1

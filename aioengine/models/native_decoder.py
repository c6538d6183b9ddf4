"""The decoders of `models.decoder` on the native CPU kernels: packed weights, one call a step for all layers.

Quantized checkpoints stay quantized. `fast` rounds most activations to 8 bits in the products; otherwise the result is that of
the dequantized float32 model but for some 1e-5 (README.md of the kernels, Arithmetic).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from aioengine.attention.base import AttentionBatch
from aioengine.attention.cpu_paged import CpuPagedBackend
from aioengine.checkpoint.dequantize import plain_dtype
from aioengine.checkpoint.gguf import GGUFTensor
from aioengine.checkpoint.lora import LoraAdapter
from aioengine.checkpoint.quantized import QuantizedMatrix
from aioengine.checkpoint.stored_tensor import StoredTensor
from aioengine.distributed.group import SINGLE_RANK, Group
from aioengine.errors import ModelError
from aioengine.models.base import CausalLM
from aioengine.models.config import DecoderConfig
from aioengine.models.decoder import DecoderForCausalLM, RotaryTables
from aioengine.models.lora import AdapterRun, lay_out
from aioengine.models.tensor_parallel import SomeColumns
from aioengine.printable import get_logger

if TYPE_CHECKING:
    from aioengine.attention.base import AttentionBackend
    from aioengine_kernels.cpu import FusedMatrix, GreedyHead, LayerWeights, NativeDecoder, PackedAdapter, PackedMatrix

logger = get_logger(__name__)

# Names of `hidden_act` -> those of the native decoder.
_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
)


def why_not_native(
    family: type[CausalLM], config: DecoderConfig, *, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
) -> str | None:
    """None if `NativeDecoderForCausalLM` can run a model of this family, else the reason."""
    from aioengine_kernels.cpu import status

    if not issubclass(family, DecoderForCausalLM):
        return f"the native decoder does not know the layers of {family.__name__}"
    if (missing := status()) is not None:
        return missing
    if device.type != "cpu" or dtype != torch.float32:
        return f"the native decoder computes in float32 on the CPU, not in {dtype} on {device.type}"
    if config.hidden_act not in _ACTIVATIONS:
        return f"the native decoder has no {config.hidden_act} activation"
    if not isinstance(backend, CpuPagedBackend):
        return f"the native decoder needs the attention backend {CpuPagedBackend.name}, not {backend.name}"
    return None


def build_native(config: DecoderConfig, *, attention_backend: AttentionBackend, fast: bool) -> CausalLM:
    """The model without its weights, for a configuration that `why_not_native` has nothing against."""
    assert isinstance(attention_backend, CpuPagedBackend)
    return NativeDecoderForCausalLM(config, attention_backend=attention_backend, fast=fast)


def announce_dense(tensors: Iterable[StoredTensor]) -> None:
    """Warn, in one line and before it happens, of quantized matrices that the native kernels keep as plain numbers."""
    stored_bytes, dense_bytes, reasons = 0, 0, dict[str, None]()
    for stored in tensors:
        if not isinstance(stored, GGUFTensor | QuantizedMatrix):
            continue
        reason = _why_dense(stored)
        if reason is not None:
            stored_bytes += stored.info.num_bytes if isinstance(stored, GGUFTensor) else stored.stored_bytes
            dense_bytes += 4 * stored.shape[0] * stored.shape[1]
            reasons[reason] = None
    if reasons:
        shown = "; ".join(list(reasons)[:3])
        logger.warning("weights of %d bytes in the file take %d bytes in memory, as float32: %s", stored_bytes, dense_bytes, shown)


def _why_dense(stored: GGUFTensor | QuantizedMatrix) -> str | None:
    """Why a quantized matrix cannot stay in its blocks; None if it can, or is none."""
    from aioengine_kernels.cpu.packing import supports_packing

    if isinstance(stored, QuantizedMatrix):
        return stored.why_dense()
    if len(stored.shape) == 1 or plain_dtype(stored.info.kind) is not None:
        return None
    return supports_packing(stored.info.kind.name, stored.shape[1])


class NativeDecoderForCausalLM(CausalLM):
    """Holds packed matrices instead of parameters. Serves every family whose class is a `DecoderForCausalLM`."""

    runs_own_threads = True

    def __init__(self, config: DecoderConfig, *, attention_backend: CpuPagedBackend, fast: bool) -> None:
        from aioengine_kernels.cpu.reused_memory import ReusedMemory

        super().__init__()
        self.config = config
        self.num_layers = config.num_layers
        self.layer_groups = config.layer_groups
        self.fast = fast
        self._group: Group = SINGLE_RANK
        self._backend = attention_backend
        self._kernels = attention_backend.kernels  # made now: they take over the number of PyTorch's threads
        tables = RotaryTables(config, device=torch.device("cpu"))
        self._cos_sin = [tables.distinct[index].table for index in tables.of_layers]
        self._layers: list[LayerWeights] = []
        self._embedding: PackedMatrix | None = None
        self._head: PackedMatrix | None = None
        self._greedy_head: GreedyHead | None = None  # in fast mode, for the head's format
        self._final_norm = torch.empty(0)
        self._adapters: dict[str, PackedAdapter] = {}
        self._logits_memory = ReusedMemory()
        self._decoder: tuple[list[torch.Tensor], NativeDecoder] | None = None  # the caches it was made for, and it

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        raise NotImplementedError("the family's own class reads config.json")

    @classmethod
    def build(cls, config: DecoderConfig, *, attention_backend: AttentionBackend, dtype: torch.dtype, device: torch.device) -> CausalLM:
        """In exact mode."""
        return build_native(config, attention_backend=attention_backend, fast=False)

    def join(self, group: Group) -> None:
        self._group = group

    def load_adapter(self, name: str, adapter: LoraAdapter) -> None:
        from aioengine_kernels.cpu import PackedAdapter

        layers = lay_out(adapter, self.config)
        packed = [{product: [(part.rows, part.a, part.b) for part in parts] for product, parts in layer.items()} for layer in layers]
        self._adapters[name] = PackedAdapter(packed, fast=self.fast)

    def unload_adapter(self, name: str) -> None:
        del self._adapters[name]

    def load_weights(self, tensors: Iterable[StoredTensor]) -> None:
        source = _Checkpoint(tensors, tied=self.config.tie_word_embeddings)
        c = self.config
        hidden, size = c.hidden_size, c.intermediate_size
        heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self._embedding = source.matrix("model.embed_tokens", c.vocab_size, hidden)
        self._head = self._embedding if c.tie_word_embeddings else source.matrix("lm_head", c.vocab_size, hidden)
        self._final_norm = source.vector("model.norm.weight", hidden)
        self._layers = [self._load_layer(source, f"model.layers.{i}", hidden, size, heads, kv_heads) for i in range(c.num_layers)]
        source.check_used_up()
        if self.fast:
            from aioengine_kernels.cpu import GreedyHead

            self._greedy_head = GreedyHead.build(self._kernels, self._head)

    def _load_layer(self, source: _Checkpoint, path: str, hidden: int, size: int, heads: int, kv_heads: int) -> LayerWeights:
        from aioengine_kernels.cpu import LayerWeights

        c, attention, mlp = self.config, f"{path}.self_attn", f"{path}.mlp"
        qkv = [(f"{attention}.q_proj", heads), (f"{attention}.k_proj", kv_heads), (f"{attention}.v_proj", kv_heads)]
        output, down = [(f"{attention}.o_proj", hidden)], [(f"{mlp}.down_proj", hidden)]
        gate_up = [(f"{mlp}.gate_proj", size), (f"{mlp}.up_proj", size)]
        post_norm, out_norms = "post_attention_layernorm", {}
        if c.sandwich_norms:
            post_norm = "pre_feedforward_layernorm"
            names = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
            out_norms = {field: source.vector(f"{path}.{name}.weight", hidden) for field, name in names.items()}
        return LayerWeights(
            qkv=source.fused(qkv, hidden),
            output=source.fused(output, heads),
            gate_up=source.fused(gate_up, hidden),
            down=source.fused(down, size),
            input_norm=source.vector(f"{path}.input_layernorm.weight", hidden),
            post_norm=source.vector(f"{path}.{post_norm}.weight", hidden),
            **out_norms,
            query_norm=source.vector(f"{attention}.q_norm.weight", c.head_dim) if c.qk_norm else None,
            key_norm=source.vector(f"{attention}.k_norm.weight", c.head_dim) if c.qk_norm else None,
            qkv_bias=source.bias(qkv) if c.qkv_bias else None,
            output_bias=source.bias(output) if c.output_bias else None,
            gate_up_bias=source.bias(gate_up) if c.mlp_bias else None,
            down_bias=source.bias(down) if c.mlp_bias else None,
        )

    def forward(
        self,
        input_ids: torch.Tensor,  # [num_tokens] int64
        positions: torch.Tensor,  # [num_tokens] int64
        *,
        kv_caches: list[torch.Tensor],
        attention_metadata: tuple[AttentionBatch, ...],
        adapters: Sequence[AdapterRun] = (),
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        from aioengine_kernels.cpu import AdaptedRows, GroupInputs
        from aioengine_kernels.cpu.packing import gather_rows

        assert self._embedding is not None, "load_weights() comes first"
        batch = attention_metadata[0]
        embedded = gather_rows(self._embedding, input_ids)
        if self.config.embedding_scale != 1.0:
            embedded.mul_(self.config.embedding_scale)
        return self._decoder_for(kv_caches).forward(
            embedded,
            positions.contiguous(),
            groups=[GroupInputs(of.slot_mapping.contiguous(), of.block_table, of.sliding_window) for of in attention_metadata],
            seq_lens=batch.seq_lens.contiguous(),
            query_start_loc=batch.query_start_loc.contiguous(),
            adapters=[AdaptedRows(self._adapters[run.name], run.first, run.end) for run in adapters],
        )

    def _decoder_for(self, kv_caches: list[torch.Tensor]) -> NativeDecoder:
        """The caches are the same lists every step, except while memory is measured before they exist."""
        if self._decoder is None or any(a is not b for a, b in zip(self._decoder[0], kv_caches, strict=True)):
            self._decoder = (list(kv_caches), self._make_decoder(kv_caches))
        return self._decoder[1]

    def _make_decoder(self, kv_caches: list[torch.Tensor]) -> NativeDecoder:
        from aioengine_kernels.cpu import DecoderShape, NativeDecoder

        c, attention = self.config, self._backend.config
        shape = DecoderShape(
            num_heads=c.num_heads,
            cache_format=self._backend.cache_format,
            hidden_size=c.hidden_size,
            rms_norm_eps=c.rms_norm_eps,
            scale=c.score_scale,
            logits_soft_cap=attention.logits_soft_cap,
            activation=_ACTIVATIONS[c.hidden_act],
        )
        return NativeDecoder(
            self._kernels,
            shape,
            self._layers,
            final_norm=self._final_norm,
            cos_sin=self._cos_sin,
            kv_caches=kv_caches,
            layer_groups=self.layer_groups,
            fast=self.fast,
            all_reduce=None if self._group.size == 1 else self._sum,
        )

    def _sum(self, x: torch.Tensor) -> None:
        self._group.all_reduce(x)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self._head is not None, "load_weights() comes first"
        # Exact in fast mode too: its rounding goes straight into the choice of the token (on the built-in model half of
        # what greedy output loses), and it is only computed where a token is sampled.
        logits = self._logits_memory.take(hidden.shape[0], self._head.rows)
        return self._kernels.linear(hidden.contiguous(), self._head, fast=False, out=logits)

    def greedy_tokens(self, hidden: torch.Tensor) -> torch.Tensor | None:
        if self._greedy_head is None:
            return None
        assert self._head is not None, "load_weights() comes first"
        return self._greedy_head.columns(hidden.contiguous(), scores=self._logits_memory.take(hidden.shape[0], self._head.rows))


class _Checkpoint:
    """Tensors by name, each taken once. Raises ModelError for one that is missing, left over or of another shape."""

    def __init__(self, tensors: Iterable[StoredTensor], *, tied: bool) -> None:
        self._tensors: dict[str, StoredTensor] = {}
        for stored in tensors:
            # Some checkpoints repeat what follows from the config: the tied head, the rotary frequencies.
            if stored.name.endswith("rotary_emb.inv_freq") or (tied and stored.name == "lm_head.weight"):
                continue
            if stored.name in self._tensors:
                raise ModelError(f"tensor {stored.name} of the checkpoint appears twice")
            self._tensors[stored.name] = stored

    def _take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        stored = self._tensors.pop(name, None)
        if stored is None:
            raise ModelError(f"the checkpoint lacks {name}")
        if stored.shape != shape:
            raise ModelError(f"tensor {name} has shape {list(stored.shape)}, config.json implies {list(shape)}")
        return stored

    def vector(self, name: str, size: int) -> torch.Tensor:
        """[size] float32."""
        stored = self._take(name, (size,))  # its shape is right before memory is taken
        out = torch.empty(size)
        stored.read_into(out)
        return out

    def bias(self, parts: Sequence[tuple[str, int]]) -> torch.Tensor:
        return torch.cat([self.vector(f"{name}.bias", rows) for name, rows in parts])

    def matrix(self, name: str, rows: int, columns: int) -> PackedMatrix:
        """Quantized as stored where the kernels have that format, else dense."""
        return pack_alike([self._take(f"{name}.weight", (rows, columns))])

    def fused(self, parts: Sequence[tuple[str, int]], columns: int) -> PackedMatrix | FusedMatrix:
        """The parts' rows as one matrix. Neighbours that are stored alike are packed together, others each in its own format."""
        from aioengine_kernels.cpu import FusedMatrix

        stored = [self._take(f"{name}.weight", (rows, columns)) for name, rows in parts]
        packed = tuple(pack_alike(list(alike)) for _, alike in groupby(stored, key=packable_kind))
        return packed[0] if len(packed) == 1 else FusedMatrix(packed)

    def check_used_up(self) -> None:
        if self._tensors:
            raise ModelError(f"tensor {min(self._tensors)} of the checkpoint is none of this architecture's")


def packable_kind(stored: StoredTensor) -> str | None:
    """The ggml type that the tensor can be packed as; None: only as plain numbers."""
    from aioengine_kernels.cpu.packing import supports_packing

    rows = stored.read_packed()
    return None if rows is None or supports_packing(rows.kind, stored.shape[1]) is not None else rows.kind


def pack_alike(parts: Sequence[StoredTensor]) -> PackedMatrix:
    """The rows of tensors that all have the same `packable_kind`."""
    from aioengine_kernels.cpu.packing import pack

    first_part = parts[0]
    if isinstance(first_part, SomeColumns):  # it comes alone: what is stacked is cut by rows
        return _pack_columns(first_part)
    kind, columns = packable_kind(parts[0]), parts[0].shape[1]
    if kind is not None:
        return pack(kind, columns, [rows.data for part in parts if (rows := part.read_packed()) is not None])
    dense = torch.empty(sum(part.shape[0] for part in parts), columns)
    first = 0
    for part in parts:
        part.read_into(dense[first : first + part.shape[0]])
        first += part.shape[0]
    return _pack_lossless(dense)


def _pack_columns(part: SomeColumns) -> PackedMatrix:
    """Cut from the packed matrix, whose blocks are shorter than those of most files; as plain numbers if that cuts a block."""
    from aioengine_kernels.cpu.packing import can_cut, cut_columns

    whole = pack_alike([part.whole])
    if can_cut(whole, part.first, part.shape[1]):
        return cut_columns(whole, part.first, part.shape[1])
    logger.warning("%s is cut inside its blocks: the rank's %d columns of it are kept as plain numbers", part.name, part.shape[1])
    dense = torch.empty(part.shape)
    part.read_into(dense)
    return _pack_lossless(dense)


def _pack_lossless(weight: torch.Tensor) -> PackedMatrix:
    """In the narrowest dtype that holds every number exactly: most checkpoints are bfloat16 at heart."""
    from aioengine_kernels.cpu.packing import pack_dense

    for dtype in (torch.bfloat16, torch.float16):
        narrow = weight.to(dtype)
        if torch.equal(narrow.float(), weight):
            return pack_dense(narrow)
    return pack_dense(weight)

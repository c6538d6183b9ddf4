"""LoRA adapters, against transformers with the adapter merged into the weights."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioengine import AsyncEngine, SamplingParams
from aioengine.checkpoint.lora import TARGETS
from aioengine.cli import main
from aioengine.errors import AioEngineError, ConfigError, InvalidRequestError, ModelError
from aioengine.events.recording.reader import read_recording
from aioengine.replay.frames import replay_frames
from aioengine.replay.tokens import replay_tokens
from aioengine.sampling_params import RequestOutputKind
from tests.waiting import until

ALL = tuple(TARGETS)
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"seed": 1, "r": 4, "modules": ALL},
    "qv": {"seed": 2, "r": 8, "modules": ("q_proj", "v_proj"), "lora_alpha": 24},
    "mlp": {"seed": 3, "r": 64, "modules": ("gate_proj", "down_proj"), "use_rslora": True},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = [5 + (7 * i) % 90 for i in range(37)]


def sizes(model: Any) -> dict[str, tuple[int, int]]:
    return {name.removesuffix(".weight"): tuple(x.shape) for name, x in model.named_parameters() if name.split(".")[-2] in ALL}


def write_adapter(folder: Path, model: Any, *, seed: int, r: int, modules: Sequence[str], lora_alpha: float = 16, **more: Any) -> Path:
    """In PEFT's form."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in sizes(model).items():
        if name.split(".")[-1] in modules:
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(r, columns, generator=generator) / math.sqrt(columns)
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, r, generator=generator) * 0.5
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": r, "lora_alpha": lora_alpha, "bias": "none", "target_modules": list(modules), **more}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(base: Path, folder: Path | None) -> Any:
    """The model of transformers with B A, scaled, added to its weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if folder is None:
        return model
    config, tensors = json.loads((folder / "adapter_config.json").read_text()), load_file(folder / "adapter_model.safetensors")
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    for name, weight in model.named_parameters():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in tensors:
            weight.data += scale * tensors[f"{prefix}.lora_B.weight"] @ tensors[f"{prefix}.lora_A.weight"]
    return model


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base, root = merged(tiny_model, None), tmp_path_factory.mktemp("loras")
    return {name: write_adapter(root / name, base, **adapter) for name, adapter in ADAPTERS.items()}


@pytest.fixture(scope="module")
def expected(tiny_model: Path, folders: dict[str, Path]) -> dict[str | None, list[int]]:
    """The greedy output of the oracle after PROMPT, by adapter."""

    def output(folder: Path | None) -> list[int]:
        history = torch.tensor([PROMPT])
        with torch.inference_mode():
            generated = merged(tiny_model, folder).generate(
                history, attention_mask=torch.ones_like(history), max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=-1
            )
        tokens: list[int] = generated[0, len(PROMPT) :].tolist()
        return tokens

    outputs: dict[str | None, list[int]] = {name: output(folders[name]) for name in folders}
    outputs[None] = output(None)
    assert len({tuple(tokens) for tokens in outputs.values()}) == 4, "the adapters change nothing: they test nothing"
    return outputs


def engine_with(model: Path, folders: dict[str, Path], **options: Any) -> AsyncEngine:
    defaults: dict[str, Any] = {
        "num_threads": 2,
        "check_invariants": True,
        "max_model_len": 256,
        "block_size": 16,
        "num_kv_cache_blocks": 100,
    }
    return AsyncEngine(str(model), loras=folders, **{**defaults, **options})


async def tokens_of(engine: AsyncEngine, lora: str | None, prompt: list[int] = PROMPT, **given: Any) -> list[int]:
    async for output in engine.generate(prompt, GREEDY.with_values(output_kind=RequestOutputKind.FINAL_ONLY), lora=lora, **given):
        last = output
    return list(last.outputs[0].token_ids)


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "dense"},
        {"weights": "exact"},
        {"weights": "fast", "kv_cache_dtype": "float32"},
        {"weights": "exact", "max_num_batched_tokens": 9, "max_num_seqs": 8},
    ],
)
async def test_a_batch_of_three_adapters_and_none_gives_each_the_tokens_of_its_merged_model(
    tiny_model: Path, folders: dict[str, Path], expected: dict[str | None, list[int]], options: dict[str, Any]
) -> None:
    names = [None, *folders, None, *reversed(folders)]
    async with engine_with(tiny_model, folders, **options) as engine:
        outputs = await asyncio.gather(*(tokens_of(engine, name) for name in names))
        alone = [await tokens_of(engine, name) for name in names[:4]]
    assert outputs == [expected[name] for name in names]
    assert alone == [expected[name] for name in names[:4]]


async def test_a_small_pool_that_preempts_changes_no_adapters_tokens(
    tiny_model: Path, folders: dict[str, Path], expected: dict[str | None, list[int]]
) -> None:
    names = [None, *folders]
    async with engine_with(tiny_model, folders, num_kv_cache_blocks=12, max_model_len=100) as engine:
        outputs = await asyncio.gather(*(tokens_of(engine, name) for name in names))
        assert engine.stats().num_preemptions > 0
    assert outputs == [expected[name] for name in names]


async def test_the_prefix_cache_serves_an_adapter_its_own_blocks_alone(
    tiny_model: Path, folders: dict[str, Path], expected: dict[str | None, list[int]]
) -> None:
    async with engine_with(tiny_model, folders) as engine:

        async def hits(lora: str | None) -> int:
            before = engine.stats().prefix_cache_hits
            assert await tokens_of(engine, lora) == expected[lora]
            return engine.stats().prefix_cache_hits - before

        assert [await hits(name) for name in (None, "all", "qv")] == [0, 0, 0]
        assert [await hits(name) for name in (None, "all", "qv")] == [32, 32, 32]


async def test_the_same_name_with_another_content_shares_no_prefix(
    tiny_model: Path, folders: dict[str, Path], expected: dict[str | None, list[int]]
) -> None:
    async with engine_with(tiny_model, {}) as engine:
        for folder in ("all", "qv"):
            await engine.load_lora("it", folders[folder])
            assert engine.lora_names == ("it",)
            assert await tokens_of(engine, "it") == expected[folder]
            await engine.unload_lora("it")
        assert engine.lora_names == ()
        assert engine.stats().prefix_cache_hits == 0


async def test_adapters_keep_their_own_blocks_on_disk(
    tiny_model: Path, folders: dict[str, Path], expected: dict[str | None, list[int]], tmp_path: Path
) -> None:
    """After a restart each finds its own, and the recording of that runs again to the same bits."""
    names, record = [None, *folders], tmp_path / "steps.jsonl"
    for turn in range(2):
        options: dict[str, Any] = {"kv_cache_dir": str(tmp_path / "kv"), "weights": "exact"}
        async with engine_with(tiny_model, folders, record=record, publish_text=True, **options) as engine:
            assert [await tokens_of(engine, name) for name in names] == [expected[name] for name in names]
            assert engine.stats().external_prefix_cache_hits == 32 * len(names) * turn
    recording = read_recording(record)
    assert replay_frames(recording.header, recording.events).difference is None
    report = await replay_tokens(recording.header, recording.events)
    assert report.difference is None
    assert report.num_token_lists == 24 * len(names)


async def test_an_adapter_in_use_is_not_unloaded(tiny_model: Path, folders: dict[str, Path], expected: dict[str | None, list[int]]) -> None:
    async with engine_with(tiny_model, folders) as engine:
        running = asyncio.create_task(tokens_of(engine, "all"))
        await until(lambda: engine.num_unfinished_reqs > 0)
        with pytest.raises(AioEngineError, match="'all' is in use by 1 requests"):
            await engine.unload_lora("all")
        await engine.unload_lora("qv")
        assert await running == expected["all"]
        await engine.unload_lora("all")
        with pytest.raises(InvalidRequestError, match="no LoRA adapter is loaded as 'all'; loaded: mlp"):
            await tokens_of(engine, "all")
        assert await tokens_of(engine, "mlp") == expected["mlp"]


async def test_unknown_names_and_names_in_use_are_refused_and_hurt_nobody(tiny_model: Path, folders: dict[str, Path]) -> None:
    async with engine_with(tiny_model, {"all": folders["all"]}) as engine:
        with pytest.raises(InvalidRequestError, match="no LoRA adapter is loaded as 'nobody'; loaded: all"):
            await tokens_of(engine, "nobody")
        with pytest.raises(InvalidRequestError, match="'nobody'"):
            await engine.unload_lora("nobody")
        with pytest.raises(ConfigError, match="loaded as 'all' already"):
            await engine.load_lora("all", folders["qv"])
        with pytest.raises(ModelError, match=r"adapter_config\.json"):
            await engine.load_lora("none", folders["qv"].parent)
        assert engine.lora_names == ("all",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"r": 65}, "1 to 64, got 65"),
        ({"r": 5}, "r is 5"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
    ],
)
async def test_what_an_adapter_may_not_ask_for_is_refused_by_name(
    tiny_model: Path, folders: dict[str, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes((folders["all"] / "adapter_model.safetensors").read_bytes())
    config = json.loads((folders["all"] / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=message):
        async with engine_with(tiny_model, {"bad": folder}):
            pass


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 300), "embed_tokens"),
        ("base_model.model.lm_head.lora_A.weight", (4, 96), "lm_head"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", (96,), "lora_magnitude_vector"),
        ("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", (4, 96), "layer 7 has lora_A of q_proj without"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", (4, 95), r"q_proj of layer 0 is for \[96, 95\]"),
    ],
)
async def test_a_tensor_that_does_not_fit_is_refused_by_name(
    tiny_model: Path, folders: dict[str, Path], tmp_path: Path, name: str, shape: tuple[int, ...], message: str
) -> None:
    tensors = load_file(folders["all"] / "adapter_model.safetensors") | {name: torch.zeros(shape)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text((folders["all"] / "adapter_config.json").read_text())
    async with engine_with(tiny_model, {}) as engine:
        with pytest.raises(ModelError, match=message):
            await engine.load_lora("bad", tmp_path)
        assert engine.lora_names == ()
        await engine.load_lora("bad", folders["all"])


async def test_several_ranks_refuse_adapters_by_name(tiny_model: Path, folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size must be 1 with loras, got 2"):
        await engine_with(tiny_model, folders, tensor_parallel_size=2).start()


async def test_a_recording_with_adapters_runs_again_and_one_with_a_changed_adapter_does_not(
    tiny_model: Path, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_adapter(tmp_path / "own", merged(tiny_model, None), **ADAPTERS["all"])
    file = tmp_path / "run.jsonl"
    async with engine_with(tiny_model, {"own": folder, "qv": folders["qv"]}, record=file, publish_text=True) as engine:
        await asyncio.gather(*(tokens_of(engine, name) for name in ("own", "qv", None)))
    for what in ("frames", "tokens"):
        assert await asyncio.to_thread(main, ["replay", str(file), "--verify", what]) == 0
    capsys.readouterr()
    write_adapter(folder, merged(tiny_model, None), **{**ADAPTERS["all"], "seed": 9})
    assert await asyncio.to_thread(main, ["replay", str(file), "--verify", "tokens"]) != 0
    assert "'own' in" in (error := capsys.readouterr().err)
    assert "is another than the recording's" in error


@pytest.fixture
def peft_adapters(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[Path, Any]]]:
    peft = pytest.importorskip("peft", reason="peft, which makes the adapters of this test, is not installed")

    def make(name: str, **config: Any) -> tuple[Path, Any]:
        """The folder, and the model with the adapter merged by peft."""
        torch.manual_seed(len(name))
        model = peft.get_peft_model(merged(tiny_model, None), peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config))
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.data *= 4
        model.save_pretrained(tmp_path / name)
        return tmp_path / name, model.merge_and_unload().eval()

    return make  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own
async def test_adapters_that_peft_made_give_the_tokens_of_the_model_that_peft_merged(
    tiny_model: Path, peft_adapters: Callable[..., tuple[Path, Any]], oracle_gaps: Callable[..., list[float]]
) -> None:
    made = {
        "first": peft_adapters("first", r=16, lora_alpha=32, target_modules=list(ALL)),
        "second": peft_adapters("second", r=4, lora_alpha=4, target_modules=["q_proj", "o_proj", "up_proj"], use_rslora=True),
        "third": peft_adapters("third", r=64, lora_alpha=16, target_modules="all-linear"),
    }
    async with engine_with(tiny_model, {name: folder for name, (folder, _) in made.items()}) as engine:
        outputs = await asyncio.gather(*(tokens_of(engine, name) for name in made))
        plain = await tokens_of(engine, None)
    for tokens, (_, model) in zip(outputs, made.values(), strict=True):
        assert tokens != plain
        assert max(oracle_gaps(model, PROMPT, tokens)) < 1e-4

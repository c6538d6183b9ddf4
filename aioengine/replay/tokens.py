"""Executes the recorded steps on a fresh worker, and compares every sampled token and the bits of every log-probability.

With packed weights on the CPU the bits depend on the instruction set and the mode of the weights alone; what differs between the
recording's machine and this one is named beside the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.engine.adapters import LoadedLora
from aioengine.engine.loop.core_events import digest_logprobs
from aioengine.engine.run_facts import RunFacts, find_run_facts
from aioengine.engine.startup import EngineSetup
from aioengine.errors import ConfigError
from aioengine.events.step_event import Event, RequestInfo, StepEvent, StepResultEvent
from aioengine.events.wire import WireHeader
from aioengine.executor.base import Executor, GrammarOutput
from aioengine.executor.uniproc import UniProcExecutor
from aioengine.models.info import resolve_model
from aioengine.outputs import ModelRunnerOutput
from aioengine.replay.difference import Difference, find_difference
from aioengine.replay.loads import LoadReplay
from aioengine.replay.recording import build_config, read_cache_config, read_settings, steps_in_order
from aioengine.resolved_config import AdmissionConfig, ModelInfo, ResolvedConfig, SchedulerConfig, WorkerConfig
from aioengine.structured_output.manager import StructuredOutputManager
from aioengine.structured_output.matcher import GrammarError


@dataclass(frozen=True, slots=True)
class TokenReport:
    """notes: what is other here than where it was recorded, in words. difference: the first; None: there is none."""

    num_steps: int
    num_token_lists: int
    notes: list[str]
    difference: Difference | None


async def replay_tokens(header: WireHeader, events: Iterable[Event], *, model: str | None = None, until: int | None = None) -> TokenReport:
    """Execute the steps of a recording again, up to the frame of step `until`.

    model: where the model is, if not where it was. Raises ConfigError if the recording has no text or is of another model, and
    ModelError if there is no model.
    """
    if not header.include_prompts:
        raise ConfigError("the recording holds no token ids (it was written without --events-text): only its frames can be verified")
    settings = read_settings(header)
    config = _read_config(header)
    files = resolve_model(model or _place(config.model))
    executor = UniProcExecutor(config, files=files)
    structured_output = _structured_output(config, files.folder)
    try:
        executor.load_model().result()
        recorded = RunFacts(**{f.name: header.facts.get(f.name) for f in dataclasses.fields(RunFacts)})
        setup = EngineSetup(config.model, None, config, executor, files)
        notes = _compare_facts(recorded, await find_run_facts(setup, with_digest=recorded.model_sha256 is not None))
        executor.initialize_kv_cache(settings.num_kv_cache_blocks).result()
        loras = {name: LoadedLora(name, folder, _load_lora(executor, name, folder)) for name, folder in config.worker.loras}
        replay = TokenReplay(executor, structured_output, config=config, loras=loras)
        difference: Difference | None = None
        for event in list(steps_in_order(events, until=until)):
            difference = await replay.take(event)
            if difference is not None:
                break
        return TokenReport(replay.num_steps, replay.num_token_lists, notes, difference)
    finally:
        structured_output.shutdown()
        executor.shutdown()


class TokenReplay:
    """One worker, given the steps of one recording. No step overlaps another: the worker takes them in order anyway."""

    def __init__(
        self,
        executor: Executor,
        structured_output: StructuredOutputManager,
        *,
        config: ResolvedConfig,
        loras: Mapping[str, LoadedLora] = MappingProxyType({}),  # those that the recording's settings name
    ) -> None:
        self.num_steps = 0
        self.num_token_lists = 0  # compared
        self._executor = executor
        self._structured_output = structured_output
        self._results: dict[int, ModelRunnerOutput] = {}
        self._loras = loras
        self._loads = LoadReplay(executor, config) if config.cache.has_kv_connector else None

    async def take(self, event: StepEvent | StepResultEvent) -> Difference | None:
        """Execute a step, or compare its result."""
        if self._loads is not None:
            self._loads.take(event)
        for info in event.finished:
            self._structured_output.remove(info.request_id)
        for added in event.added:
            self._check_lora(added)
            params = added.sampling_params
            if params is not None and params.structured_outputs is not None:
                self._structured_output.remove(added.request_id)
                self._structured_output.add(added.request_id, await self._structured_output.compile(params.structured_outputs), params)
        if isinstance(event, StepEvent):
            self._results[event.step_id] = self._execute(event.output)
            self.num_steps += 1
            return None
        return self._compare(event, self._results.pop(event.step_id))

    def _check_lora(self, info: RequestInfo) -> None:
        """Raises ConfigError for a request with an adapter that is not here as it was."""
        if info.lora_name is None:
            return
        lora = self._loras.get(info.lora_name)
        if lora is None:
            raise ConfigError(f"request {info.request_id!r} has the LoRA adapter {info.lora_name!r}, which was loaded at run time")
        if lora.key != info.lora_key:
            raise ConfigError(f"the LoRA adapter {info.lora_name!r} in {lora.folder} is another than the recording's")

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        executed = self._executor.execute_model(output)
        sampled = self._executor.sample_tokens(self._masks(output))
        executed.result()
        result = sampled.result()
        for req_id, token_ids in zip(result.req_ids, result.sampled_token_ids, strict=True):
            if req_id in output.structured_output_request_ids and req_id in self._structured_output:
                self._structured_output.accept(req_id, token_ids)
        return result

    def _masks(self, output: SchedulerOutput) -> GrammarOutput | None:
        if not output.structured_output_request_ids:
            return None
        masks: dict[str, bytes] = {}
        for req_id in output.num_scheduled_tokens:
            if req_id in output.structured_output_request_ids and req_id in self._structured_output:
                try:
                    masks[req_id] = self._structured_output.bitmask(req_id)
                except GrammarError:  # it has ended or failed, and its token is not taken in: whoever tells comes with the result
                    continue
        return GrammarOutput(masks)

    def _compare(self, event: StepResultEvent, result: ModelRunnerOutput) -> Difference | None:
        """Of the requests whose tokens were taken in: others had ended, and nobody has seen what the worker made of them."""
        digests = digest_logprobs(result.logprobs)
        for req_id in event.num_new_tokens:
            index = result.req_id_to_index.get(req_id)
            now = [] if index is None else result.sampled_token_ids[index]
            recorded: Any = event.sampled_token_ids.get(req_id, [])
            found = find_difference(f"sampled_token_ids[{req_id!r}]", recorded, now) or find_difference(
                f"logprob_digests[{req_id!r}]", event.logprob_digests.get(req_id), digests.get(req_id)
            )
            if found is not None:
                return Difference(event.step_id, "result", *found)
            self.num_token_lists += bool(now)
        return None


def _read_config(header: WireHeader) -> ResolvedConfig:
    stated: Mapping[str, Any] = header.config.get("model", {})
    model = build_config(ModelInfo, header.config, "model")
    worker = build_config(WorkerConfig, header.config, "worker")
    return ResolvedConfig(
        model=dataclasses.replace(
            model, eos_token_ids=frozenset(stated.get("eos_token_ids", ())), layer_windows=tuple(model.layer_windows)
        ),
        scheduler=build_config(SchedulerConfig, header.config, "scheduler"),
        cache=read_cache_config(header),
        worker=dataclasses.replace(
            worker,
            logits_processors=tuple(worker.logits_processors),
            loras=tuple((name, folder) for name, folder in worker.loras),
            cpu_affinity=None,  # cores are of the machine it was recorded on; no token depends on them
        ),
        admission=AdmissionConfig(),
        seed=None,
        check_invariants=False,
    )


def _load_lora(executor: Executor, name: str, folder: str) -> str:
    """Its sha256."""
    (sha256,) = executor.collective_rpc("load_lora", name, folder).result()
    assert isinstance(sha256, str)
    return sha256


def _place(model: ModelInfo) -> str:
    """Where it was, if something is there still, else its name."""
    return model.path if model.path and Path(model.path).exists() else model.name


def _structured_output(config: ResolvedConfig, folder: Path) -> StructuredOutputManager:
    from aioengine.checkpoint.tokenizer import load_tokenizer
    from aioengine.checkpoint.tokenizer_files import has_tokenizer

    tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
    return StructuredOutputManager(tokenizer, vocab_size=config.model.vocab_size, eos_token_ids=config.model.eos_token_ids)


def _compare_facts(recorded: RunFacts, here: RunFacts) -> list[str]:
    """What is other here, in words. Raises ConfigError for another model: no token of it could be compared."""
    if recorded.model_sha256 is not None and recorded.model_sha256 != here.model_sha256:
        raise ConfigError(f"this is another model: sha256 {here.model_sha256}, recorded with {recorded.model_sha256}")
    names = {"isa": "instruction set", "weights": "weights", "torch": "torch", "num_threads": "threads"}
    pairs = [(text, getattr(recorded, name), getattr(here, name)) for name, text in names.items()]
    return [f"{text}: recorded with {then}, here {now}" for text, then, now in pairs if then != now]

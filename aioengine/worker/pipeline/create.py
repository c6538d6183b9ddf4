"""Which pipeline a device's steps go through."""

from __future__ import annotations

from aioengine.errors import ConfigError
from aioengine.resolved_config import ResolvedConfig
from aioengine.worker.block_table import BlockTables
from aioengine.worker.device import Device
from aioengine.worker.pipeline.base import StepPipeline
from aioengine.worker.pipeline.host import HostPipeline
from aioengine.worker.request_state import RequestStates
from aioengine.worker.sample.logits_processor import load_logits_processors


def create_pipeline(device: Device, config: ResolvedConfig, *, states: RequestStates, block_tables: BlockTables) -> StepPipeline:
    """How steps are built and sampled on `device`, over the given slot tables.

    Raises ConfigError for logits processors on a device that runs behind the host.
    """
    transfers = device.create_transfers()
    if transfers is None:
        return HostPipeline(
            states=states,
            block_tables=block_tables,
            device=device,
            logprobs_mode=config.worker.logprobs_mode,
            processors=load_logits_processors(config),
        )
    if config.worker.logits_processors:
        raise ConfigError(
            f"logits_processors ({', '.join(config.worker.logits_processors)}) run on the CPU only: "
            "on a GPU the sampled tokens, which they look at, are not known to the host in time"
        )
    from aioengine.worker.pipeline.device import DevicePipeline  # with Triton, which takes a while to import

    return DevicePipeline(
        states=states,
        block_tables=block_tables,
        transfers=transfers,
        max_num_tokens=config.scheduler.max_num_batched_tokens,
        vocab_size=config.model.vocab_size,
        num_kv_heads=config.model.num_kv_heads,
        logprobs_mode=config.worker.logprobs_mode,
    )

"""What one step costs vLLM's scheduler alone. Run with vLLM's own Python; imports nothing of ours.

The procedure is that of `aioengine_bench.host_cost`: N decoding requests, prompts of 64 tokens, blocks of 16, prefix
caching on, no statistics, the worker's answer built outside the clock. Prints one line of JSON for each N.

    python vllm_host_cost.py --model FOLDER_WITH_CONFIG_JSON 32 256 1024
    python vllm_host_cost.py --model FOLDER_WITH_CONFIG_JSON --admission 512 2000
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import sys
import time
from typing import Any

PROMPT_LEN = 64
BLOCK_SIZE = 16
NUM_WARMUP_STEPS = 30


def make_scheduler(num_reqs: int, model: str) -> Any:
    torch = importlib.import_module("torch")
    config = importlib.import_module("vllm.config")
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    model_config = config.ModelConfig(model=model, dtype="float32", max_model_len=2048, skip_tokenizer_init=True)
    scheduler_config = config.SchedulerConfig(
        max_num_seqs=num_reqs, max_num_batched_tokens=max(8192, num_reqs), max_model_len=2048, is_encoder_decoder=False
    )
    cache_config = config.CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    vllm_config = config.VllmConfig(model_config=model_config, scheduler_config=scheduler_config, cache_config=cache_config)
    num_blocks = num_reqs * 40 + 10
    spec = interface.FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=3, head_size=64, dtype=torch.float32)
    group = interface.KVCacheGroupSpec(["layer"], spec)
    cache_config.num_gpu_blocks = num_blocks
    return importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler(
        vllm_config=vllm_config,
        kv_cache_config=interface.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group]),
        structured_output_manager=importlib.import_module("vllm.v1.structured_output").StructuredOutputManager(vllm_config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


def request_maker() -> tuple[Any, Any]:
    """Two functions: parameters for so many tokens, and a request of an id, a prompt and parameters, whose blocks it hashes at once."""
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    sha256 = importlib.import_module("vllm.utils.hashing").sha256
    request_class = importlib.import_module("vllm.v1.request").Request
    params_class = importlib.import_module("vllm.sampling_params").SamplingParams
    utils.init_none_hash(sha256)
    block_hasher = utils.get_request_block_hasher(BLOCK_SIZE, sha256)

    def make_params(max_tokens: int) -> Any:
        params = params_class(max_tokens=max_tokens, ignore_eos=True, temperature=0)
        params.update_from_generation_config({}, 2)
        return params

    def make(request_id: str, prompt: list[int], params: Any) -> Any:
        return request_class(
            request_id=request_id, prompt_token_ids=prompt, sampling_params=params, pooling_params=None, block_hasher=block_hasher
        )

    return make_params, make


def add_requests(scheduler: Any, num_reqs: int) -> None:
    make_params, make = request_maker()
    params = make_params(1000)
    for index in range(num_reqs):
        prompt = [(index * 7 + position) % 40000 for position in range(PROMPT_LEN)]
        scheduler.add_request(make(f"r{index}", prompt, params))


def measure_admission(prompt_len: int, *, model: str, num_requests: int = 400) -> dict[str, Any]:
    scheduler = make_scheduler(-(-prompt_len // (BLOCK_SIZE * 10)) + 10, model)
    answer_class = importlib.import_module("vllm.v1.outputs").ModelRunnerOutput
    make_params, make = request_maker()
    params = make_params(1)
    spent_s: list[float] = []
    for index in range(num_requests):
        prompt = [1000 + position % 30000 for position in range(prompt_len)] + [index, index + 1]
        start = time.thread_time()
        scheduler.add_request(make(f"r{index}", prompt, params))
        output = scheduler.schedule()
        scheduled = time.thread_time()
        assert index == 0 or output.scheduled_new_reqs[0].num_computed_tokens >= prompt_len - BLOCK_SIZE
        answer = answer_class(req_ids=[f"r{index}"], req_id_to_index={f"r{index}": 0}, sampled_token_ids=[[5]])
        answered = time.thread_time()
        scheduler.update_from_output(output, answer)
        spent_s.append(scheduled - start + time.thread_time() - answered)
        assert not scheduler.running
    return {
        "engine": "vllm",
        "prompt_len": prompt_len,
        "admission_min_us": min(spent_s) * 1e6,
        "admission_median_us": statistics.median(spent_s) * 1e6,
    }


def measure(num_reqs: int, *, model: str, num_steps: int) -> dict[str, Any]:
    scheduler = make_scheduler(num_reqs, model)
    add_requests(scheduler, num_reqs)
    answer_class = importlib.import_module("vllm.v1.outputs").ModelRunnerOutput
    schedule_s: list[float] = []
    update_s: list[float] = []
    step = 0
    while len(schedule_s) < num_steps + NUM_WARMUP_STEPS:
        start = time.perf_counter()
        output = scheduler.schedule()
        scheduled = time.perf_counter()
        req_ids = list(output.num_scheduled_tokens)
        answer = answer_class(
            req_ids=req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=[[100 + step] for _ in req_ids],
        )
        answered = time.perf_counter()
        scheduler.update_from_output(output, answer)
        updated = time.perf_counter()
        if output.total_num_scheduled_tokens == len(req_ids) == num_reqs:
            schedule_s.append(scheduled - start)
            update_s.append(updated - answered)
            step += 1
    schedule_s, update_s = schedule_s[NUM_WARMUP_STEPS:], update_s[NUM_WARMUP_STEPS:]
    return {
        "engine": "vllm",
        "num_reqs": num_reqs,
        "schedule_min_us": min(schedule_s) * 1e6,
        "schedule_median_us": statistics.median(schedule_s) * 1e6,
        "update_min_us": min(update_s) * 1e6,
        "update_median_us": statistics.median(update_s) * 1e6,
        "version": importlib.import_module("vllm").__version__,
    }


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("num_reqs", type=int, nargs="*")
    parser.add_argument("--num-steps", type=int, default=200)
    parser.add_argument("--model", required=True, help="a folder with a config.json")
    parser.add_argument("--admission", type=int, nargs="+", default=[], metavar="PROMPT_LEN", help="admission of cached prompts")
    args = parser.parse_args()
    for prompt_len in args.admission:
        gc.collect()
        print(json.dumps(measure_admission(prompt_len, model=args.model)), flush=True)
    for num_reqs in args.num_reqs:
        gc.collect()
        print(json.dumps(measure(num_reqs, model=args.model, num_steps=args.num_steps)), flush=True)
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""vLLM on CPU, in one process, stepped by hand so that every token has its time. Run with vLLM's own Python."""

from __future__ import annotations

import importlib
import itertools
import os
import time
from typing import Any

from protocol import Answer, Request, serve

# What it takes on a small CPU machine: one process, no thread binding (which would leave it one thread), no compile cache
# that fails to load on the next start.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_USE_AOT_COMPILE": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
# For `isa=avx2`: what oneDNN, torch's own kernels and the compiler behind torch.compile read. vLLM's kernels read none of it.
AVX2_ENVIRONMENT = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3",
}


def _hide_avx512() -> None:
    """Let torch know of no AVX-512 and AMX: vLLM asks it which of its libraries to load."""
    cpu: Any = importlib.import_module("torch.cpu")
    known = {name: value for name, value in cpu.get_capabilities().items() if not name.startswith(("avx512", "amx"))}
    cpu.get_capabilities = lambda: known


class Vllm:
    name = "vllm"
    tells_tokens = True

    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ.update(ENVIRONMENT)
        os.environ["OMP_NUM_THREADS"] = str(settings["num_threads"])
        options = settings.get("options", {})
        if options.get("isa") == "avx2":
            os.environ.update(AVX2_ENVIRONMENT)
            _hide_avx512()
        vllm = importlib.import_module("vllm")
        dtype = options.get("dtype", "float32")
        llm = vllm.LLM(
            model=settings["model_folder"],
            dtype=dtype,
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_num_seqs"],
            seed=0,
            disable_log_stats=True,
        )
        self._engine = llm.llm_engine
        self._params = vllm.SamplingParams
        self._delta = importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA
        self._numbers = itertools.count()
        self.version = vllm.__version__
        self.precision = f"{dtype} weights and arithmetic"
        self.note = "LLMEngine, one process"

    def run(self, requests: list[Request]) -> list[Answer]:
        self._engine.reset_prefix_cache()
        answers: dict[str, Answer] = {}
        start = time.perf_counter()
        for request in requests:
            request_id = f"run-{next(self._numbers)}"
            params = self._params(
                temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False, output_kind=self._delta
            )
            self._engine.add_request(request_id, {"prompt_token_ids": request["prompt"]}, params)
            answers[request_id] = Answer()
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter() - start
            for output in outputs:
                answers[output.request_id].add(now, list(output.outputs[0].token_ids))
        return list(answers.values())

    def close(self) -> None:
        """It ends with the process."""


if __name__ == "__main__":
    serve(Vllm)

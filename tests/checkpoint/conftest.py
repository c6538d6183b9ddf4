from tests.models.fixtures import gguf_folder, safetensors_folder, scratch, tokenizer_cache

__all__ = ["gguf_folder", "safetensors_folder", "scratch", "tokenizer_cache"]

"""Files in, tensors and words out: finding and fetching a model, reading its weights, its tokenizer and its chat template."""

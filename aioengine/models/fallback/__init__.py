"""Any decoder that transformers knows, by its own modelling code over our paged cache."""

"""Brigade: recipes for fine-tuning language models on many processes."""

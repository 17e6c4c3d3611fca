"""The model: its files, its weights, its tokenizer, its attention, and adapters on it."""

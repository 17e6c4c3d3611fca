"""The Trainer, and what happens in and between its steps."""

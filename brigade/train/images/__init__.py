"""Images beside text: the model's parts, its processor, and the batches that hold both."""

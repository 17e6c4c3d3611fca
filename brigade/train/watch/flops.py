"""FLOPs that training a model takes, and the share of a device's peak that a run reaches."""


def flops_per_token(parameters: int, layers: int, hidden_size: int, attended_length: float) -> float:
    """Return the model FLOPs of forward and backward for one token of full fine-tuning: 6 N + 12 L h s.

    Torchtitan's and PaLM's convention (arXiv 2204.02311, appendix B): N all parameters, embeddings included; attention without
    the causal discount; recomputation not counted. attended_length: the length of a token's sample, as the mean over tokens.
    """
    return 6 * parameters + 12 * layers * hidden_size * attended_length


def utilisation(tokens_per_second_per_device: float, flops_per_token: float, peak_tflops: float) -> float:
    """Return the model FLOPs utilisation, in percent of the device's dense bf16 peak."""
    return 100 * tokens_per_second_per_device * flops_per_token / (peak_tflops * 1e12)

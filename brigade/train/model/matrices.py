"""Which parameters of a model are matrices that Muon steps."""

from torch import nn

from .. import upstream

MATRIX = "use_muon"  # in a group of the optimizer's parameters


def matrices_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the parameters that Muon steps: matrices of layers, and fused experts, which are a matrix for each.

    AdamW keeps embeddings, the head, vectors, convolutions and whatever is no layer's `weight`.
    """
    output = getattr(model, "get_output_embeddings", lambda: None)()
    heads = [output, getattr(model, "score", None)]
    heads += [module for module in model.modules() if isinstance(module, nn.Embedding)]
    others = {id(parameter) for head in heads if head is not None for parameter in head.parameters()}
    found = dict[str, tuple[int, ...]]()
    experts = {path for path, module in model.named_modules() if upstream.are_experts(module)}
    for name, parameter in model.named_parameters():
        path, _, last = name.rpartition(".")
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        is_matrix = (len(shape) == 2 and last == "weight") or (len(shape) == 3 and path in experts)
        if is_matrix and min(shape[-2:]) > 1 and parameter.requires_grad and id(parameter) not in others:
            found[name] = shape
    return found

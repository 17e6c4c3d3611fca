"""A model class of one's own: a Llama whose logits stay between -cap and cap, as Gemma 2's do."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from brigade import train


class CappedLlamaConfig(LlamaConfig):
    model_type = "capped_llama"  # in config.json, by which Transformers finds the class
    logit_cap: float = 30.0


class CappedHead(torch.nn.Linear):
    cap: float

    def forward(self, hidden):
        return self.cap * torch.tanh(super().forward(hidden) / self.cap)


class CappedLlama(LlamaForCausalLM):
    config_class = CappedLlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.lm_head = CappedHead(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.cap = config.logit_cap
        self.post_init()  # initial weights, and the head's tied to the embeddings


AutoConfig.register("capped_llama", CappedLlamaConfig)
AutoModelForCausalLM.register(CappedLlamaConfig, CappedLlama)

if __name__ == "__main__":
    train.main()

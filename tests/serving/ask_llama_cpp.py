"""Ask llama.cpp about a GGUF file, in an environment of its own.

stdin: JSON, {"model": path, "chats": [messages], "texts": [...], "new_tokens": n}; with "prompts", lists of token ids, these are
continued instead of the chats, beyond any end. stdout: JSON, {"tokens": of each text, "prompts" and "answers": of each chat};
an answer is a list with the five likeliest [token, log-probability] at each of its places.
"""

import json
import os
import sys
import urllib.request

import xllamacpp

asked = json.load(sys.stdin)
params = xllamacpp.CommonParams()
params.model.path = asked["model"]
params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = 512, 1, False, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.use_jinja = True
answer = os.dup(1)
os.dup2(2, 1)  # llama.cpp writes its log there
server = xllamacpp.Server(params)


def post(path, **body):
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def tokens_of(text):
    return post("/tokenize", content=text, parse_special=True, add_special=True)["tokens"]


prompts = [post("/apply-template", messages=messages)["prompt"] for messages in asked["chats"]]
told = {"tokens": [tokens_of(text) for text in asked["texts"]], "prompts": prompts, "answers": []}
options = {"n_predict": asked["new_tokens"], "temperature": 0, "n_probs": 5, "cache_prompt": False}
options["ignore_eos"] = "prompts" in asked
for prompt in asked.get("prompts") or [tokens_of(prompt) for prompt in prompts]:
    done = post("/completion", prompt=prompt, **options)
    words = [[[top["id"], top["logprob"]] for top in word["top_logprobs"]] for word in done["completion_probabilities"]]
    told["answers"].append(words)
with os.fdopen(answer, "w") as file:
    json.dump(told, file)
os._exit(0)  # its threads do not end by themselves

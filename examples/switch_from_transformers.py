"""Switch from transformers: the same call on the same weights gives the same tokens.

python examples/switch_from_transformers.py --model path/or/name
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from selfspec import Engine
from selfspec.models.loading import resolve

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="demo", help="folder, GGUF file or hub name")
parser.add_argument("--max-new-tokens", type=int, default=48)
args = parser.parse_args()

folder = resolve(args.model)  # downloads or converts the model once
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

# The engine shares the storage of the model's weights: no second copy, and the model stays usable.
engine = Engine.from_model(model, tokenizer)
print(engine)

inputs = tokenizer("def fibonacci(n):", return_tensors="pt")
settings = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
theirs = model.generate(**inputs, **settings)
ours = engine.generate(**inputs, **settings)

print(tokenizer.decode(ours[0], skip_special_tokens=True))
print("same tokens:", torch.equal(ours, theirs))

# Statistics of the call: steps, drafted and accepted tokens, the plan, and why it decoded plainly where it did.
output = engine.generate(**inputs, **settings, return_dict_in_generate=True)
print(output.stats[0])

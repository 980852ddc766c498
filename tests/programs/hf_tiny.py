"""A user's program over transformers: it generates, or scores what was generated. It knows nothing of any observer.

usage: hf_tiny.py gen|score FILE [--family llama|qwen3-moe] [--cache dynamic|static] [--shift] [--train STEPS]
"""

import argparse
import json
import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("what", choices=["gen", "score"])
parser.add_argument("file")
parser.add_argument("--family", default="llama")
parser.add_argument("--cache", default="dynamic")
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--shift", action="store_true")
parser.add_argument("--train", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
SIZES = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "intermediate_size": 176}
if args.family == "llama":
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
else:
    moe = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **moe))
model = model.to(getattr(torch, args.dtype)).eval()

PROMPTS = [[(7 * i + 3 * j) % 255 + 1 for j in range(length)] for i, length in enumerate((5, 9, 12))]


def left_padded(sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, sequences))
    ids = torch.tensor([[0] * (width - len(s)) + s for s in sequences])
    mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in sequences])
    return ids, mask


if args.what == "gen":
    ids, mask = left_padded(PROMPTS)
    more = {"cache_implementation": "static"} if args.cache == "static" else {}
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0, **more)
    sequences = [line[mask.shape[1] - len(p) :].tolist() for line, p in zip(out, PROMPTS)]
    with open(args.file, "w") as file:
        json.dump(sequences, file)
else:
    with open(args.file) as file:
        sequences = json.load(file)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    ids, mask = left_padded(sequences[rank::world])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, position_ids=None if args.shift else positions, use_cache=False)
    for _ in range(args.train):
        loss = model(input_ids=ids, attention_mask=mask, position_ids=positions, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

print("the program's own words")
print("and its own complaints", file=sys.stderr)
sys.exit(5 if args.what == "gen" else 0)

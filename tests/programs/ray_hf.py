"""A user's program whose models live in Ray actors: one generates, one scores. It knows nothing of any observer.

usage: ray_hf.py FILE
"""

import json
import sys

import ray


@ray.remote(num_cpus=0)
class Policy:
    def __init__(self, kind):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        torch.set_num_threads(1)
        sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "intermediate_size": 176}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).eval()
        self.kind = kind

    def generate(self, prompts):
        import torch

        with torch.no_grad():
            out = self.model.generate(
                torch.tensor(prompts),
                attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
                max_new_tokens=5,
                do_sample=False,
                pad_token_id=0,
            )
        return out.tolist()

    def score(self, sequences):
        import torch

        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor(sequences), use_cache=False).logits
        return logits.float().log_softmax(-1).sum().item()


ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
generator = Policy.remote("gen")
sequences = ray.get(generator.generate.remote([[5, 6, 7, 8], [9, 10, 11, 12]]))
trainer = Policy.remote("train")
value = ray.get(trainer.score.remote(sequences))
with open(sys.argv[1], "w") as file:
    json.dump([sequences, value], file)
ray.shutdown()
print("done")

"""A user's program over megatron-core: its own training loop or its own engine loop. It knows of no observer.

usage: mcore_tiny.py gen|train FILE [--eps EPS] [--steps N]
"""

import argparse
import json

import torch
import torch.nn.functional as F
from cpu_platform import platform

parser = argparse.ArgumentParser()
parser.add_argument("what", choices=["gen", "train"])
parser.add_argument("file")
parser.add_argument("--eps", type=float, default=1e-5)
parser.add_argument("--steps", type=int, default=0)
args = parser.parse_args()
torch.set_num_threads(1)


def build(dtype):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=128,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        normalization="RMSNorm",
        layernorm_epsilon=args.eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    torch.manual_seed(1)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(config, spec, 128, 128, position_embedding_type="rope", parallel_output=False)
    return model.to(dtype)


class Words:
    eod, bos = -1, None

    def tokenize(self, text):
        return [int(word) for word in text.split()]

    def detokenize(self, tokens, **_):
        return " ".join(map(str, tokens))


def engine_over(model):
    from megatron.core.inference.config import InferenceConfig
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
    from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

    sizes = InferenceConfig(
        block_size_tokens=16,
        buffer_size_gb=0.01,
        max_requests=8,
        max_tokens=256,
        max_sequence_length=128,
        materialize_only_last_token_logits=False,
    )
    context = DynamicInferenceContext(model.config, sizes)
    controller = TextGenerationController(GPTInferenceWrapper(model, context), Words())
    return DynamicInferenceEngine(controller, context)


def generate(model):
    from megatron.core.inference.sampling_params import SamplingParams

    engine = engine_over(model)
    wanted = SamplingParams(num_tokens_to_generate=6, top_k=1, termination_id=-1, return_log_probs=True)
    prompts = {i: [(11 * i + 5 * j) % 127 + 1 for j in range(n)] for i, n in enumerate((4, 9, 13))}
    for number, prompt in prompts.items():
        engine.add_request(number, list(prompt), wanted)
    done = {}
    while engine.has_unfinished_requests():
        for record in engine.step_modern()["finished_request_records"]:
            request = record.merge()
            done[request.request_id] = prompts[request.request_id] + [int(t) for t in request.generated_tokens]
    return [done[i] for i in sorted(done)]


def log_probs(model, tokens):
    length = len(tokens)
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    logits = model(torch.tensor([tokens]), torch.arange(length)[None], mask)
    return F.log_softmax(logits[0, :-1].float(), -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def main():
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("gloo", "tcp://127.0.0.1:0", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    model = build(torch.bfloat16)
    if args.what == "gen":
        with open(args.file, "w") as file:
            json.dump(generate(model.eval()), file)
        return
    with open(args.file) as file:
        sequences = json.load(file)
    with torch.no_grad():
        for tokens in sequences:
            log_probs(model.eval(), tokens)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(args.steps):
        loss = -sum(log_probs(model.train(), tokens).mean() for tokens in sequences)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


with platform():
    main()
print("done")

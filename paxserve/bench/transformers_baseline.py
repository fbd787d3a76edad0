"""Hugging Face transformers on the same requests, in static batches. A script of its own: it must not import paxserve.

Reads one JSON object on stdin:
    directory, gguf_file     where the model is; gguf_file is null for a Hugging Face directory
    dtype, batch_size, threads, repeat
    warmup, requests         lists of [prompt token ids, tokens to generate]
and writes one to stdout:
    seconds                  of each repetition
    torch, transformers      their versions

Requests are taken in their order, `batch_size` at a time, padded on the left, and a batch generates as many tokens as its
longest answer needs, greedily and past any end-of-sequence token.
"""

import json
import sys
import time

import torch
import transformers


def main() -> None:
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["dtype"])
    options = {}
    if job["gguf_file"] and hasattr(transformers, "GgufConfig"):
        # Versions that have this class may otherwise leave the weights packed, which is another computation.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["directory"], gguf_file=job["gguf_file"], dtype=dtype, **options
    ).eval()
    if {parameter.dtype for parameter in model.parameters()} != {dtype}:
        raise RuntimeError(f"transformers did not load all weights as {dtype}")
    # No end-of-sequence token: every answer runs to the length asked for. Token 0 pads, masked.
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)

    run(model, job["warmup"], job["batch_size"])
    seconds = []
    for _ in range(job["repeat"]):
        start = time.perf_counter()
        run(model, job["requests"], job["batch_size"])
        seconds.append(time.perf_counter() - start)
    json.dump({"seconds": seconds, "torch": torch.__version__, "transformers": transformers.__version__}, sys.stdout)


def run(model: transformers.PreTrainedModel, requests: list, batch_size: int) -> None:
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        longest = max(len(prompt) for prompt, _ in batch)
        tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in batch])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
        new_tokens = max(count for _, count in batch)
        with torch.inference_mode():
            output = model.generate(tokens, attention_mask=mask, max_new_tokens=new_tokens)
        if output.shape[1] != longest + new_tokens:
            raise RuntimeError(f"generate stopped after {output.shape[1] - longest} of {new_tokens} tokens")


if __name__ == "__main__":
    main()

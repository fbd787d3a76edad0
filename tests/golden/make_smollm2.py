"""Writes smollm2.json: what Hugging Face transformers makes of SmolLM2-135M-Instruct, greedily and in float32.

Run by hand, with transformers, torch and gguf installed:

    python tests/golden/make_smollm2.py PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf

For every prompt the file holds its text, its token ids, the next `NEW_TOKENS` greedy token ids (an end-of-sequence token
does not stop the continuation) and the TOP largest logits after the prompt and after some of the continuation's tokens.
It also holds some values of some weights, in the order transformers has them (llama.cpp's differs for q and k).
Prompts with a greedy choice closer than MIN_GAP are refused, so that token equality is well defined.
"""

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

NEW_TOKENS = 32
STEPS = (0, 1, 8, 31)  # continuation tokens whose logits are kept; step 0 is the last prompt position
TOP = 8
MIN_GAP = 2e-3

PASSAGE = (
    "The harbour had been quiet since the ferry stopped running. In the mornings a few fishermen still mended their nets "
    "on the stone steps, and in the evenings the lamps along the quay were lit one after the other by an old man who had "
    "done so for as long as anyone could remember. Nobody asked him why he kept at it. When the new bridge was opened, "
    "two miles upstream, the mayor gave a speech about progress, about trade, and about the generations to come; the old "
    "man listened from the back of the crowd, and then he went home to fetch his ladder. That winter the river froze for "
    "the first time in thirty years. Children who had never seen ice walked across it in their thin shoes, and the "
    "baker's daughter, who was seven, lost a red glove somewhere near the middle. She told everyone that the river had "
    "taken it as a toll. In the spring the glove came back, or one very much like it, hanging from a nail beside the "
    "lamp at the end of the quay, and the old man said he knew nothing about it at all. What the girl did next was"
)

PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "Water boils at a temperature of",
    "Photosynthesis is the process by which",
    "List three reasons to learn a second language:\n1.",
    "def fibonacci(n):\n    ",
    'import json\n\nwith open("config.json") as f:\n    config =',
    "SELECT name, COUNT(*) FROM orders\nWHERE",
    "for (int i = 0; i < n; i++) {\n    sum +=",
    "<html>\n<head>\n<title>",
    "La Révolution française a commencé en",
    "Der Hund läuft durch den",
    "El agua es importante porque",
    "今日はとても",
    "Москва — столица",
    "I love pizza 🍕 and ice cream 🍦 because",
    "1, 2, 4, 8, 16, 32,",
    "3.14159 + 2.71828 =",
    "Dear Sir or Madam,\n\nI am writing to",
    PASSAGE,
    [{"role": "user", "content": "What is gravity?"}],
    [{"role": "user", "content": "Write a haiku about the sea."}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Who wrote Hamlet?"},
        {"role": "assistant", "content": "William Shakespeare wrote Hamlet."},
        {"role": "user", "content": "When was it first performed?"},
    ],
    [{"role": "user", "content": f"Summarize this story in one sentence.\n\n{PASSAGE} never written down."}],
]


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids that SmolLM2's published tokenizer.json gives: it splits digits apart, which a GGUF file only names."""
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer.encode(text).ids


def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """NEW_TOKENS greedy tokens, computed with a KV cache."""
    model.generation_config.eos_token_id = None
    inputs = torch.tensor([prompt])
    out = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=NEW_TOKENS)
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def continuation_logits(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """float32 [NEW_TOKENS, vocab]: the logits each continuation token was chosen from, without a KV cache."""
    return model(torch.tensor([prompt + tokens[:-1]]), use_cache=False, logits_to_keep=NEW_TOKENS).logits[0]


def weight_samples(model: PreTrainedModel) -> dict[str, dict]:
    """16 values of every weight of two layers and of those outside the layers, by flat index."""
    samples = {}
    for name, weight in model.state_dict().items():
        if ".layers." not in name or ".layers.0." in name or ".layers.29." in name:
            flat = weight.flatten()
            indices = [i * (len(flat) - 1) // 15 for i in range(16)]
            samples[name] = {"shape": list(weight.shape), "indices": indices, "values": flat[indices].tolist()}
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    path: Path = parser.parse_args().gguf

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    cases, smallest_gap = [], float("inf")
    for prompt in PROMPTS:
        text = (
            prompt
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        )
        ids = prompt_ids(tokenizer.backend_tokenizer, text)
        tokens = greedy(model, ids)
        values, tops = continuation_logits(model, ids, tokens).topk(TOP)
        gap = float((values[:, 0] - values[:, 1]).min())
        print(f"{len(ids):4d} tokens, smallest gap {gap:.4f}: {tokenizer.decode(tokens)!r}", flush=True)
        if tops[:, 0].tolist() != tokens or gap < MIN_GAP:
            raise SystemExit(f"the greedy choice is not well defined (gap {gap}); replace the prompt {text!r}")
        smallest_gap = min(smallest_gap, gap)
        case = {"messages": prompt} if isinstance(prompt, list) else {}
        case |= {"text": text, "prompt_ids": ids, "greedy_ids": tokens, "smallest_gap": round(gap, 5)}
        case["top_logits"] = [
            {"step": step, "ids": tops[step].tolist(), "values": [round(v, 5) for v in values[step].tolist()]}
            for step in STEPS
        ]
        cases.append(case)

    facts = {
        "model": path.name,
        "made_with": {name: version(name) for name in ("transformers", "torch", "gguf")},
        "smallest_gap": round(smallest_gap, 5),
        "weights": weight_samples(model),
    }
    # One line per prompt: small, and still readable in a diff.
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    target = Path(__file__).with_name("smollm2.json")
    target.write_text(f'{json.dumps(facts)[:-1]}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()

"""paxserve: LLM inference on JAX and Pallas, with a paged KV cache and continuous batching."""

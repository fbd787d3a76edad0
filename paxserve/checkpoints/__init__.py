"""Reading and writing model weights: safetensors, GGUF and Orbax."""

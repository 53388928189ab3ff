"""Weight parts: an engine's storage as boxes of Hugging Face-named tensors."""

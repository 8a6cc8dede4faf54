"""Precision policies, torch.compile, CUDA graphs, bfloat16 weights with float32 masters."""

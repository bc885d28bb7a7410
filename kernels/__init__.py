"""Attention, rotate and gather kernels, each beside its plain PyTorch reference."""

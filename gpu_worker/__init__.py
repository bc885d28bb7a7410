"""The GPU worker: loads KV ahead of the compute, saves it behind, and runs the model."""

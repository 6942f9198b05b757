"""Computes: owns the device, the model weights, the KV cache and the sampler."""

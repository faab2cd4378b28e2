"""Readers of quantized weight formats: stored tensors become a QuantizedTensor, whatever the format."""

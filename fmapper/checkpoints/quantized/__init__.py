"""Quantised checkpoints: dequantised while they are read, or kept as they are.

blocks    for all formats: boxes aligned to blocks
scaled    values with a scale for each block: FP8, MXFP4, torchao's
packed    integers in words of 32 bits: AWQ, GPTQ
ggml      the blocks of GGUF
array     `QuantizedArray`: values, scales and zeros as one node
finding   finds the parts of quantised arrays in a checkpoint
"""

"""Quantised checkpoints: dequantised while they are read, or kept as they are.

blocks    what formats share: boxes that end where blocks do
scaled    values with a scale for each block: FP8, MXFP4, torchao's
packed    integers in words of 32 bits: AWQ, GPTQ
ggml      the blocks of GGUF
array     `QuantizedArray`: values, scales and zeros as one node
finding   which arrays of a checkpoint are one quantised array
"""

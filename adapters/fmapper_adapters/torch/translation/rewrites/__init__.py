"""Passes over graphs of torch that write what lowerings emit as a person would write it.

functions  activations, variances, sums of exponentials by torch's names
gates      products with joined arrays as a product for each
loops      the dimensions that loops run over
products   products of arrays of more dimensions as `torch.einsum`
rows       rows at indices, and sums of rows by their segments
shaping    reshapes, choices of rows, pooling
values     magnitudes and copies where nothing has a derivative, unit matrices
zeros      signs of zeros that nothing reads
"""

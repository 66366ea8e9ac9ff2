"""ATen operations that neural networks are made of: attention, convolution, pooling, losses."""

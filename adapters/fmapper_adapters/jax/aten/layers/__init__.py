"""ATen operations of neural networks: attention, convolution, pooling, losses."""

"""ATen operations from linear algebra and Fourier transforms."""

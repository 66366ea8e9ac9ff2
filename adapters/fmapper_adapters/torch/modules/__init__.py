"""Takes apart what holds tensors: modules, optimizers, caches; and finds what refers to them."""

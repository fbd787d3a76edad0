"""Flax (nnx) model definitions. They call `pallas_kernels` and name logical axes; they know no request."""

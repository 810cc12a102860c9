"""One read of a gradient: kernels, sketches, norms, digests."""

"""Published results: set-up, published numbers, and ours beside them."""

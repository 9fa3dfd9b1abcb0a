"""Published results, one file each: the set-up, the published numbers, and how ours are measured."""
